/** The answers inside a file that `hlatctl share` has written. Such a file is this page without a server. */

const node = document.getElementById("shared");

/** What the file contains; null: this page has a server. */
export const shared = node && JSON.parse(node.textContent);

/**
 * Return what the server answered to a request when the file was written; undefined if the file doesn't contain it.
 * @param {string} path - with its query.
 */
export function answerOf(path) {
  const { pathname, searchParams } = new URL(path, "http://localhost"), query = Object.fromEntries(searchParams);
  const [, kind, id, part = ""] = pathname.split("/").slice(1).map(decodeURIComponent);
  return structuredClone(find(kind, id, part, query)); // the views change what they get
}

function find(kind, id, part, query) {
  if (kind === "info") return shared.info;
  if (kind === "sweeps") return shared.sweeps[id];
  if (kind === "compare") return compared(query.runs.split(","), shared.compared[query.baselines || ""]);
  if (kind === "paired") return shared.paired[query.runs];
  if (kind !== "runs") return undefined;
  if (id === undefined) return { complete: true, revision: 0, rows: shared.rows };
  const run = shared.runs[id];
  if (part === "curves") return run?.curves && curves(run.curves, query);
  if (part === "items") return query.task ? undefined : { milestones: [] };
  return run?.[part || "details"];
}

/** Curves of a part of a run, over one of its axes. The file has one resolution. */
function curves({ all, axes }, { keys = "", x = "step", from = 0, to = Infinity }) {
  const axis = axes[x], kept = all.steps.map((step) => step >= Number(from) && step <= Number(to)), cut = (values) => values.filter((_, index) => kept[index]);
  const series = {};
  for (const key of keys ? keys.split(",") : all.available) {
    const { y, low = y, high = y } = all.series[key] || {};
    if (y) series[key] = { y: cut(y), low: cut(low), high: cut(high) };
    else if (axis.series[key]) series[key] = axis.series[key];
  }
  return { ...all, ...axis, x, steps: cut(all.steps), tokens: cut(all.tokens), times: cut(all.times), xs: cut(axis.xs), series };
}

/** A comparison of some of the file's runs. Which score is best is known for all of them together only. */
function compared(ids, whole) {
  const all = whole?.runs.map((row) => row.run_id), places = ids.map((id) => all?.indexOf(id) ?? -1);
  if (places.includes(-1)) return undefined;
  if (String(all) === String(ids)) return whole;
  const pick = (values) => places.map((place) => values[place]), plain = (value) => value && { ...value, standing: "" };
  const differs = ({ values }) => values.some((value) => JSON.stringify(value) !== JSON.stringify(values[0]));
  return {
    ...whole, runs: pick(whole.runs), milestones: pick(whole.milestones),
    config: whole.config.map((row) => ({ ...row, values: pick(row.values) })).filter(differs),
    scores: whole.scores.map((row) => ({ ...row, values: pick(row.values).map(plain), baselines: Object.fromEntries(Object.entries(row.baselines).map(([name, value]) => [name, plain(value)])) })),
    notes: [...whole.notes, "The best scores are marked only while all runs of this file are compared."],
  };
}
