/** Which rows of the list are shown, in which groups and order. Pure. */

/** Statuses, those that need attention first. */
export const STATUSES = ["running", "stopping", "created", "failed", "interrupted", "damaged", "stopped", "finished", "archived"];

/** Return a function that computes something of a row once: a changed row is another object. */
function once(compute) {
  const known = new WeakMap();
  return (row) => {
    if (!known.has(row)) known.set(row, compute(row));
    return known.get(row);
  };
}

/** Return the text of a row that the filter looks at. */
const textOf = once((row) => {
  const tags = Object.entries(row.tags || {}).map(([key, value]) => `${key}=${value}`);
  const parts = [row.run_id, row.name, row.note, row.experiment, row.sweep, row.parent, row.status, ...(row.overrides || []), ...tags];
  return parts.filter(Boolean).join("\n").toLowerCase();
});

/** Return the settings that a run's command changed: a Map from key to text. */
export const settingsOf = once((row) => new Map((row.overrides || []).map((each) => {
  const at = each.indexOf("=");
  return [each.slice(0, at).replace(/^[+~]+/, ""), each.slice(at + 1)];
})));

/** Return the tags of all rows as `key=value`, sorted. */
export function tagsOf(rows) {
  const tags = new Set();
  for (const row of rows) for (const [key, value] of Object.entries(row.tags || {})) tags.add(`${key}=${value}`);
  return [...tags].sort();
}

/** Return the settings that not all of the rows have with the same value, those of most rows first. */
export function varying(rows) {
  const found = new Map();
  for (const row of rows) {
    for (const [key, value] of settingsOf(row)) {
      const seen = found.get(key);
      if (!seen) found.set(key, { value, amount: 1, varies: false });
      else { seen.amount += 1; seen.varies ||= seen.value !== value; }
    }
  }
  const kept = [...found].filter(([, { amount, varies }]) => varies || amount < rows.length);
  return kept.map(([key, { amount }]) => ({ key, amount })).sort((a, b) => b.amount - a.amount || (a.key < b.key ? -1 : 1));
}

/** Whether a run is hidden until someone asks for archived ones. */
export const isArchived = (row) => row.status === "archived";

/** A word of the filter that asks for a field: `status:failed`, `loss<3`, `lr>=0.004`. */
const FIELD = /^([a-z_.]+)(:|>=|<=|>|<|=)(.+)$/;
const ORDERS = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b };
const FIELDS = {
  tokens: "tokens", step: "step", loss: "loss", val: "validation_loss", validation_loss: "validation_loss", mfu: "mfu", cost: "cost_usd",
  hours: "node_hours", left: "left_s", status: "status", experiment: "experiment", sweep: "sweep", fork: "parent", name: "name", note: "note",
};
const GROUP = /(?:^|\s)group:(\S+)/i;

/** Return how the list is grouped: by the word `group:…` of the filter, or else by the parameter. Another word names a tag. */
export function groupOf(params) {
  const group = GROUP.exec(params.q || "")?.[1] ?? (params.group || "sweep");
  return ["sweep", "experiment", "fork", "none"].includes(group) || group.startsWith("tag:") ? group : `tag:${group}`;
}

/** Return a filter without its word `group:…`. */
export const withoutGroup = (q) => (q || "").replace(GROUP, "");

/** Return whether a row fits one word of a filter, which was taken apart by `FIELD`. */
function fits(row, { word, name, sign, wanted }) {
  if (!name) return textOf(row).includes(word);
  if (name === "archived") return isArchived(row) === ["yes", "true", "1"].includes(wanted);
  const value = valueOf(row, name);
  if (sign in ORDERS) return value !== null && value !== "" && Number.isFinite(Number(value)) && ORDERS[sign](Number(value), Number(wanted));
  if (value === null) return textOf(row).includes(word);
  return sign === ":" ? String(value).toLowerCase().includes(wanted) : String(value).toLowerCase() === wanted || (value !== "" && Number(value) === Number(wanted));
}

/** Return a field of a row by a name of the filter: of the row, a score, a tag, or a setting that was changed; null if it has none. */
function valueOf(row, name) {
  if (name in FIELDS) return row[FIELDS[name]] ?? null;
  const lower = (pairs) => pairs.find(([key]) => key.toLowerCase() === name || key.toLowerCase().endsWith(`.${name}`))?.[1] ?? null;
  return lower(Object.entries(row.scores || {})) ?? lower(Object.entries(row.tags || {})) ?? lower([...settingsOf(row)]);
}

/**
 * Return the rows that a filter keeps, and how many simulated and archived ones are hidden although they fit.
 * @param {{q?: string, status?: string, tag?: string, sim?: string, arch?: string}} params
 */
export function filtered(rows, params) {
  const words = withoutGroup(params.q).toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, wanted] = FIELD.exec(word) || [];
    return { word, name, sign, wanted };
  });
  const archived = params.arch === "1" || params.status === "archived" || words.some(({ name, wanted }) => name === "archived" || (name === "status" && wanted === "archived"));
  const kept = [];
  let simulated = 0, hidden = 0;
  for (const row of rows) {
    if (params.status && row.status !== params.status) continue;
    if (params.tag && !hasTag(row, params.tag)) continue;
    if (!words.every((word) => fits(row, word))) continue;
    if (row.simulated && params.sim !== "1") simulated += 1;
    else if (!archived && isArchived(row)) hidden += 1;
    else kept.push(row);
  }
  return { kept, simulated, archived: hidden };
}

function hasTag(row, tag) {
  const at = tag.indexOf("="), key = at < 0 ? tag : tag.slice(0, at);
  return key in (row.tags || {}) && (at < 0 || row.tags[key] === tag.slice(at + 1));
}

/** Value of a row in each column, for sorting. `set:KEY`, `tag:KEY` and `score:TASK` are columns too. */
const VALUES = {
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
const KINDS = { set: (row) => settingsOf(row), tag: (row) => new Map(Object.entries(row.tags || {})), score: (row) => new Map(Object.entries(row.scores || {})) };

/** Return the kind and the name of a column `set:KEY`, `tag:KEY` or `score:TASK`; null for another one. */
export function dynamic(key) {
  const at = key.indexOf(":"), kind = key.slice(0, Math.max(0, at));
  return Object.hasOwn(KINDS, kind) ? { kind, name: key.slice(at + 1) } : null;
}

/** Return the text or number that a row has in a dynamic column; undefined if it has none. */
export const dynamicValue = (row, { kind, name }) => KINDS[kind](row).get(name);

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

/** Return a function from a row to the name of its group; empty for a row that is in none. */
function grouping(group, rows) {
  if (group === "none") return () => "";
  if (group === "experiment") return (row) => row.experiment;
  if (group.startsWith("tag:")) return (row) => { const value = row.tags?.[group.slice(4)]; return value === undefined ? "" : value || group.slice(4); };
  if (group === "fork") {
    const parents = new Set(rows.map((row) => row.parent));
    return (row) => row.parent || (parents.has(row.run_id) ? row.run_id : "");
  }
  return (row) => row.sweep;
}

/**
 * Return the items of the list in order: `{row, depth}` for a run and `{group, rows, row}` for a group.
 *
 * A group's own `row` has sums, the mean loss and the newest times, so that it sorts among the runs. Sweeps do; other
 * groups come before the runs that are in none.
 * @param {{sort: string, group: string, open: (name: string) => boolean}} options - `open`: whether a group is unfolded.
 */
export function items(rows, { sort, group, open }) {
  const groupOfRow = grouping(group, rows), groups = new Map(), tops = [];
  for (const row of rows) {
    const name = groupOfRow(row);
    if (!name) tops.push({ row, depth: 0 });
    else if (groups.has(name)) groups.get(name).push(row);
    else groups.set(name, [row]);
  }
  for (const [name, members] of groups) tops.push({ group: name, rows: members, row: summary(name, members), depth: 0 });
  const found = [];
  const order = sorted(tops, sort);
  for (const item of group === "sweep" ? order : [...order.filter((each) => each.group), ...order.filter((each) => !each.group)]) {
    found.push(item);
    if (item.group && open(item.group)) found.push(...sorted(item.rows.map((row) => ({ row, depth: 1 })), sort));
  }
  return found;
}

/** Orders texts so that `run-9` comes before `run-10`. */
const TEXTS = new Intl.Collator("en", { numeric: true });

/** Return items in the order of a column: `loss` ascends, `-loss` descends. Unknown values are last, equal ones newest first. */
function sorted(unsorted, sort) {
  const down = sort.startsWith("-"), key = sort.replace(/^-/, ""), column = dynamic(key);
  const value = column ? (row) => comparable(dynamicValue(row, column)) : VALUES[key] || VALUES.created;
  const keyed = unsorted.map((item) => ({ item, row: item.row, value: value(item.row) ?? null }));
  keyed.sort((a, b) => {
    if (a.value === b.value) return (b.row.created_unix_s || 0) - (a.row.created_unix_s || 0) || TEXTS.compare(a.row.run_id, b.row.run_id);
    if (a.value === null || b.value === null) return a.value === null ? 1 : -1;
    const texts = typeof a.value === "string" && typeof b.value === "string" ? TEXTS.compare(a.value, b.value) : 0;
    const less = texts ? texts < 0 : typeof a.value === typeof b.value ? a.value < b.value : typeof a.value === "number";
    return (less ? -1 : 1) * (down ? -1 : 1);
  });
  return keyed.map(({ item }) => item);
}

/** Return a number for a text that is one, so that 0.004 comes before 1e-2 and 10 after 9. */
function comparable(value) {
  return value === undefined || value === "" || !Number.isFinite(Number(value)) ? value : Number(value);
}

function summary(name, rows) {
  const all = (key) => rows.map((row) => finite(row[key])).filter((value) => value !== null);
  const sum = (key) => all(key).reduce((total, value) => total + value, 0);
  const losses = all("loss"), least = (values) => (values.length ? values.reduce((a, b) => Math.min(a, b)) : null);
  const most = (values) => (values.length ? values.reduce((a, b) => Math.max(a, b)) : null);
  return {
    run_id: name, name: "", simulated: rows.every((row) => row.simulated),
    status: STATUSES.find((status) => rows.some((row) => row.status === status)) || rows[0].status,
    step: sum("step"), total_steps: rows.every((row) => row.total_steps) ? sum("total_steps") : null, tokens: sum("tokens"),
    loss: mean(losses), low: least(losses), high: most(losses), validation_loss: least(all("validation_loss")), scores: {},
    tokens_per_s: all("tokens_per_s").length ? sum("tokens_per_s") : null, mfu: null,
    left_s: most(all("left_s")), cost_usd: all("cost_usd").length ? sum("cost_usd") : null,
    created_unix_s: most(all("created_unix_s")), needs_person: rows.some((row) => row.needs_person),
    tags: {}, note: "", overrides: [],
  };
}
