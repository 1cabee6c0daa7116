/** Requests to the server of this page, and its stream of events. A shared file has the answers in it. */

import { answerOf, shared } from "./shared.js";

/** A refused or failed request. `status` is 0 if the server can't be reached. */
export class ApiError extends Error {
  constructor(status, message, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

/**
 * Return the JSON of an address.
 * @throws {ApiError}
 */
export async function get(path, query = {}, signal = undefined) {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(kept).toString();
  return request(text ? `${path}?${text}` : path, { signal });
}

/** Ask the server to change something, and return its answer. */
export const post = (path) => request(path, { method: "POST", headers: { "X-Hlatctl": "1" } });

async function request(path, options) {
  if (shared) return inFile(path, options);
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.", "start it again with `hlatctl ui`");
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  throw new ApiError(answer.status, (body && body.error) || `The server answered ${answer.status}.`, (body && body.hint) || "");
}

function inFile(path, { method = "GET" }) {
  const answer = method === "GET" ? answerOf(path) : undefined;
  if (answer === undefined) throw new ApiError(404, "This file doesn't contain it.", "Ask whoever made the file for `hlatctl share RUN`, or for a link to their page.");
  return answer;
}

/** Have the browser save what the server answers to an address, and return its size in bytes. */
export async function download(path, name) {
  const answer = await fetch(path, { cache: "no-store" }).catch(() => null);
  if (!answer?.ok) throw new ApiError(answer?.status || 0, (await answer?.json().catch(() => null))?.error || "The server does not answer.");
  const content = await answer.blob(), url = URL.createObjectURL(content), link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
  return content.size;
}

export const runPath = (id, part = "") => `/api/runs/${encodeURIComponent(id)}${part}`;

/** Longest silence of a stream; the server writes a comment every 15 s. */
const SILENCE_MS = 40_000;
const RETRY_MS = 1000;

/**
 * Reads the server's events, and connects again after each failure.
 *
 * A reader of its own instead of EventSource, which can't see comments: a connection that died without a word, as
 * after a laptop slept, would look alive.
 */
export class Stream {
  /**
   * @param {(name: string, data: any, revision: number) => void} onEvent - `revision`: of the rows, if it is about them.
   * @param {(state: "open"|"lost"|"refused") => void} onState
   */
  constructor(onEvent, onState) {
    Object.assign(this, { onEvent, onState, run: "", revision: null, controller: null, timer: 0, heardAt: Date.now(), isClosed: false });
  }

  /** Follow a run as well; empty: none. The former connection stays until the new one stands, which goes on from its revision. */
  follow(run) {
    this.run = run;
    this.connect();
  }

  /** Give the connection back, until `connect`. */
  close() {
    clearTimeout(this.timer);
    if (this.controller) this.controller.abort();
    Object.assign(this, { controller: null, isClosed: true });
  }

  async connect() {
    clearTimeout(this.timer);
    this.isClosed = false;
    if (shared) return this.onState("open");
    const former = this.controller, controller = new AbortController();
    this.controller = controller;
    let state = "lost";
    try {
      state = await this.read(controller, former);
    } catch {
      // The network's errors have no details that help; the state says what is known.
    }
    if (former) former.abort();
    if (this.controller !== controller) return;
    this.controller = null;
    this.onState(state);
    this.timer = setTimeout(() => this.connect(), RETRY_MS);
  }

  async read(controller, former) {
    const query = new URLSearchParams({ run: this.run, since: this.revision ?? "" });
    const answer = await fetch(`/api/events?${query}`, { cache: "no-store", signal: controller.signal });
    if (!answer.ok) return answer.status === 401 ? "refused" : "lost";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", isOpen = false;
    for (;;) {
      const silence = setTimeout(() => reader.cancel(), SILENCE_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return "lost";
      this.heardAt = Date.now();
      if (!isOpen) {
        isOpen = true;
        if (former) former.abort();
        if (this.controller === controller) this.onState("open");
      }
      const parts = (text + value.replaceAll("\r", "")).split("\n\n");
      text = parts.pop();
      if (!controller.signal.aborted) parts.forEach((part) => this.dispatch(part));
    }
  }

  dispatch(block) {
    let name = "message", revision = null;
    const data = [];
    for (const line of block.split("\n")) {
      if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("id:")) revision = this.revision = Number(line.slice(3));
      else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    }
    if (data.length) this.onEvent(name, JSON.parse(data.join("\n")), revision);
  }
}
