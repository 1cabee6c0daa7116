/** Which rows of the list are shown, and in which order. Pure. */

/** Statuses, those that need attention first. */
export const STATUSES = ["running", "stopping", "created", "failed", "interrupted", "damaged", "stopped", "finished", "archived"];

const texts = new WeakMap();

/** Return the text of a row that the filter looks at. */
function textOf(row) {
  if (!texts.has(row)) {
    const tags = Object.entries(row.tags || {}).map(([key, value]) => `${key}=${value}`);
    const parts = [row.run_id, row.name, row.note, row.differs, row.experiment, row.sweep, row.status, ...tags];
    texts.set(row, parts.filter(Boolean).join("\n").toLowerCase());
  }
  return texts.get(row);
}

/** Return the tags of all rows as `key=value`, sorted. */
export function tagsOf(rows) {
  const tags = new Set();
  for (const row of rows) for (const [key, value] of Object.entries(row.tags || {})) tags.add(`${key}=${value}`);
  return [...tags].sort();
}

/** A word of the filter that asks for a field: `status:failed`, `loss<3`, `lr>=0.004`. */
const FIELD = /^([a-z_.]+)(:|>=|<=|>|<|=)(.+)$/;
const ORDERS = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b };
const FIELDS = { tokens: "tokens", step: "step", loss: "loss", val: "validation_loss", validation_loss: "validation_loss", mfu: "mfu", cost: "cost_usd", hours: "node_hours", left: "left_s" };

/** Return whether a row fits one word of a filter. */
function fits(row, word) {
  const [, name, sign, wanted] = FIELD.exec(word) || [];
  if (!name) return textOf(row).includes(word);
  const value = valueOf(row, name);
  if (sign in ORDERS) return value !== null && value !== "" && Number.isFinite(Number(value)) && ORDERS[sign](Number(value), Number(wanted));
  if (value === null) return textOf(row).includes(word);
  return sign === ":" ? String(value).toLowerCase().includes(wanted) : String(value).toLowerCase() === wanted || (value !== "" && Number(value) === Number(wanted));
}

/** Return a field of a row by a name of the filter: of the row, a score, a tag, or a setting that was changed; null if it has none. */
function valueOf(row, name) {
  if (name in FIELDS) return row[FIELDS[name]] ?? null;
  if (["status", "experiment", "sweep", "name", "note"].includes(name)) return row[name] ?? null;
  const lower = (pairs) => pairs.find(([key]) => key.toLowerCase() === name || key.toLowerCase().endsWith(`.${name}`))?.[1] ?? null;
  return lower(Object.entries(row.scores || {})) ?? lower(Object.entries(row.tags || {})) ?? lower(settingsOf(row));
}

/** Return the settings that a run's command changed, as pairs of key and text. */
export function settingsOf(row) {
  return (row.overrides || []).map((each) => { const at = each.indexOf("="); return [each.slice(0, at).replace(/^[+~]+/, ""), each.slice(at + 1)]; });
}

/**
 * Return the rows that a filter keeps, and how many simulated ones it hides.
 * @param {{q?: string, status?: string, tag?: string, sim?: string}} params
 */
export function filtered(rows, params) {
  const words = (params.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  const kept = [];
  let hidden = 0;
  for (const row of rows) {
    if (params.status && row.status !== params.status) continue;
    if (params.tag && !hasTag(row, params.tag)) continue;
    if (!words.every((word) => fits(row, word))) continue;
    if (row.simulated && params.sim !== "1") hidden += 1;
    else kept.push(row);
  }
  return { kept, hidden };
}

function hasTag(row, tag) {
  return Object.entries(row.tags || {}).some(([key, value]) => `${key}=${value}` === tag);
}

/** What a column sorts by; null sorts last. */
export const SORTS = {
  name: (row) => (row.name || row.run_id).toLowerCase(),
  status: (row) => STATUSES.indexOf(row.status),
  progress: (row) => share(row),
  loss: (row) => finite(row.loss),
  validation_loss: (row) => finite(row.validation_loss),
  score: (row) => mean(scoresOf(row).map(([, value]) => value)),
  tokens_per_s: (row) => finite(row.tokens_per_s),
  mfu: (row) => finite(row.mfu),
  left_s: (row) => finite(row.left_s),
  cost_usd: (row) => finite(row.cost_usd),
  created: (row) => finite(row.created_unix_s),
};

/** Return the scores that have no column of their own, as pairs of name and value. */
export function scoresOf(row) {
  return Object.entries(row.scores || {}).filter(([name]) => name !== "validation_loss");
}

/** Return the done share of a run; null if its length is unknown. */
export function share(row) {
  return row.total_steps ? row.step / row.total_steps : null;
}

const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

function mean(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/**
 * Return the items of the list: `{row, depth}` for a run and `{sweep, rows, row}` for a folded sweep, in order.
 *
 * A sweep's own `row` has sums, the best losses and the newest times, so that it sorts among the runs.
 * @param {Set<string>} open - sweeps that are unfolded.
 */
export function items(rows, sort, open) {
  const sweeps = new Map(), tops = [];
  for (const row of rows) {
    if (!row.sweep) tops.push({ row, depth: 0 });
    else if (sweeps.has(row.sweep)) sweeps.get(row.sweep).push(row);
    else sweeps.set(row.sweep, [row]);
  }
  for (const [sweep, trials] of sweeps) tops.push({ sweep, rows: trials, row: summary(sweep, trials), depth: 0 });
  const compare = comparison(sort);
  const found = [];
  for (const item of tops.sort((a, b) => compare(a.row, b.row))) {
    found.push(item);
    if (item.sweep && open.has(item.sweep)) {
      const own = differing(item.rows);
      for (const row of [...item.rows].sort(compare)) found.push({ row, depth: 1, differs: own(row) });
    }
  }
  return found;
}

/** Return a function that gives a row's settings which some of the rows don't have. */
function differing(rows) {
  const values = new Map();
  for (const row of rows) for (const [key, value] of settingsOf(row)) values.set(key, (values.get(key) || new Map()).set(value, (values.get(key)?.get(value) || 0) + 1));
  const shown = [...values].filter(([, found]) => found.size > 1 || [...found.values()][0] < rows.length).map(([key]) => key);
  return (row) => settingsOf(row).filter(([key]) => shown.includes(key)).map(([key, value]) => `${key.split(".").at(-1)}=${value}`).join(" ");
}

/** Return an order of rows: `loss` ascends, `-loss` descends. Unknown values are last, equal ones newest first. */
function comparison(sort) {
  const down = sort.startsWith("-"), key = SORTS[sort.replace(/^-/, "")] || SORTS.created;
  return (a, b) => {
    const x = key(a), y = key(b);
    if (x === y) return (b.created_unix_s || 0) - (a.created_unix_s || 0) || (a.run_id < b.run_id ? -1 : 1);
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * (down ? -1 : 1);
  };
}

function summary(sweep, rows) {
  const all = (key) => rows.map((row) => finite(row[key])).filter((value) => value !== null);
  const sum = (key) => all(key).reduce((total, value) => total + value, 0);
  const least = (key) => (all(key).length ? Math.min(...all(key)) : null);
  const totals = rows.every((row) => row.total_steps);
  return {
    run_id: sweep, name: "", sweep, simulated: rows.every((row) => row.simulated),
    status: STATUSES.find((status) => rows.some((row) => row.status === status)) || rows[0].status,
    step: sum("step"), total_steps: totals ? sum("total_steps") : null, tokens: sum("tokens"),
    loss: least("loss"), validation_loss: least("validation_loss"), scores: {},
    tokens_per_s: all("tokens_per_s").length ? sum("tokens_per_s") : null, mfu: null,
    left_s: all("left_s").length ? Math.max(...all("left_s")) : null,
    cost_usd: all("cost_usd").length ? sum("cost_usd") : null,
    created_unix_s: all("created_unix_s").length ? Math.max(...all("created_unix_s")) : null,
    needs_person: rows.some((row) => row.needs_person),
    tags: {}, note: "", differs: "", experiment: rows[0].experiment,
  };
}
