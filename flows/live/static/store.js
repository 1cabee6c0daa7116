/** What the server has told: the rows of all runs, and its own settings. */

import { get } from "./api.js";

export const store = {
  /** Rows by run id. */
  rows: new Map(),
  /** Whether runs that are not in the index yet are still being read. */
  complete: false,
  loaded: false,
  /** The server's revision of the rows that were read. */
  revision: 0,
  /** Answer of /api/info. */
  info: null,
};

/** Events that came while the rows were read: their rows may be newer. */
let early = [];

const MOST_EARLY = 100;

/** The stream tells when all runs are read; this is for a page that was just changing streams then. */
const POLL_MS = 15_000;
let timer = 0;

/**
 * Read the settings and all rows. While rows are missing, read them again.
 * @param {() => void} changed - called after each answer.
 */
export async function load(changed) {
  clearTimeout(timer);
  early = [];
  const [info, runs] = await Promise.all([get("/api/info"), get("/api/runs")]);
  store.info = info;
  store.rows = new Map(runs.rows.map((row) => [row.run_id, row]));
  store.complete = runs.complete;
  store.revision = runs.revision;
  store.loaded = true;
  for (const [revision, work] of early) if (revision > runs.revision) work();
  early = [];
  if (!runs.complete) timer = setTimeout(() => load(changed).catch(() => {}), POLL_MS);
  changed();
}

/** Take changed rows. */
export function merge(rows, revision) {
  take(revision, () => rows.forEach((row) => store.rows.set(row.run_id, row)));
}

/** Forget runs that are gone. */
export function remove(ids, revision) {
  take(revision, () => ids.forEach((id) => store.rows.delete(id)));
}

function take(revision, work) {
  work();
  early.push([revision, work]);
  early.splice(0, early.length - MOST_EARLY);
}
