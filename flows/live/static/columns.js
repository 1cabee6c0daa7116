/** The columns of the list of runs: which are shown, their cells, and the dialog that chooses them. */

import { bar, bdi, check, chip, fill, h, openDialog } from "./dom.js";
import * as text from "./format.js";
import { dynamic, dynamicValue, scoresOf, share, varying } from "./rows.js";
import { list } from "./state.js";

/** Most settings that get a column by themselves, and the share of the shown runs that must have changed each. */
const MOST_SETTINGS = 4, LEAST_SHARE = 0.1;
/** Most columns of one kind that the dialog offers. */
const MOST_OFFERED = 60;
/** The name's share of the width, as the style has it. */
const NAME_SHARE = 0.18;
/** Least and largest width of a column of values; its title decides, at so many pixels a letter. */
const WIDTH = 92, MOST_WIDTH = 180, LETTER = 9;

const number = (key, title, label, show, options = {}) => ({
  key, title, width: 74, class: "c-number", label, optional: true, has: (row) => row[key] !== null && row[key] !== undefined, cell: (row) => show(row[key]), ...options,
});

/**
 * `has`: whether a row has a value; an optional column without one is hidden. `phone`: shown on a narrow screen. `rises`: the
 * first click sorts upwards. `says`: the whole name of a column that `ofKey` made.
 */
const BASE = [
  { key: "status", title: "Status", width: 112, rises: true, phone: true, class: "c-status", hint: (row) => row.what || row.problem || "", cell: (row) => chip(row.status) },
  { key: "progress", title: "Progress", width: 128, phone: true, class: "c-progress", cell: progress },
  number("loss", "Loss", "loss", text.number, { rises: true, phone: true, optional: false, cell: loss }),
  { key: "curve", title: "Loss curve", width: 104, unsorted: true, phone: true, class: "c-curve", optional: true, has: (row) => row.spark, cell: (row) => sparkline(row.spark) || " " },
  number("validation_loss", "Val. loss", "valid.", text.number, { width: 84, rises: true }),
  { key: "score", title: "Scores", width: 118, class: "c-scores", optional: true, has: (row) => scoresOf(row).length > 0, cell: scores,
    hint: (row) => scoresOf(row).map(([name, value]) => `${name} ${text.number(value)}`).join("\n") },
  number("tokens_per_s", "Tok/s", "tok/s", text.count, { phone: true }), number("mfu", "MFU", "MFU", text.percent),
  number("left_s", "Left", "left", text.duration, { width: 92, rises: true, phone: true }), number("cost_usd", "Cost", "cost", text.cost),
];
/** The last two; between them and the others are those of settings, tags and scores. */
const LAST = [
  { key: "about", title: "Tags, note, settings", unsorted: true, phone: true, class: "c-differs", least: 180 },
  { key: "created", title: "Created", width: 146, class: "c-created", hint: (row) => text.time(row.created_unix_s), cell: (row) => text.shortTime(row.created_unix_s) },
];
const ALL = [...BASE, ...LAST];

/**
 * Return the shown columns in order, without the run's name.
 * @param {string} chosen - keys, separated by commas; empty: those with values, and the settings that differ in most rows.
 * @param {object[]} rows - the shown rows.
 * @param {{key: string, amount: number}[]} settings - what varies between them.
 */
export function columns(chosen, rows, settings) {
  if (chosen) {
    const keys = list(chosen);
    return [...BASE, ...keys.filter(dynamic).map(ofKey), ...LAST].filter(({ key }) => keys.includes(key));
  }
  const most = settings.filter(({ amount }) => amount >= LEAST_SHARE * rows.length).slice(0, MOST_SETTINGS);
  const kept = (each) => !each.optional || rows.some((row) => each.has(row));
  return [...BASE.filter(kept), ...most.map(({ key }) => ofKey(`set:${key}`)), ...LAST];
}

/** Return the column of a setting, a tag or a score. */
function ofKey(key) {
  const column = dynamic(key), cut = column.name.lastIndexOf(".") + 1;
  const show = (value) => (typeof value === "number" ? text.number(value) : value);
  return {
    key, width: Math.min(MOST_WIDTH, Math.max(WIDTH, 24 + LETTER * Math.max(column.name.length - cut, 0.8 * cut))), class: "c-value", rises: column.kind !== "score", title: [cut > 0 && h("small", {}, bdi(column.name.slice(0, cut))), bdi(column.name.slice(cut))],
    says: column.name, hint: (row, rows) => values(rows || [row], column).join("\n"),
    cell: (row, rows) => {
      const found = values(rows || [row], column);
      return found.length > 1 ? spread(found) : found.length && h("bdi", { class: "clip" }, show(found[0]));
    },
  };
}

/** Return the least and the largest of several numbers, or how many texts there are. */
function spread(found) {
  const numbers = found.map(Number).sort((a, b) => a - b);
  const says = numbers.every(Number.isFinite) ? `${text.number(numbers[0], 3)}–${text.number(numbers.at(-1), 3)}` : `${text.whole(found.length)} values`;
  return h("small", { class: "clip" }, says);
}

const values = (rows, column) => [...new Set(rows.map((row) => dynamicValue(row, column)).filter((value) => value !== undefined))];

/** Return the least width of a table with these columns, in pixels. The name has a share of it, at least 220 pixels. */
export function leastWidth(shown) {
  const others = 36 + shown.reduce((sum, { width, least }) => sum + (width || least), 0);
  return Math.max(others + 220, Math.ceil(others / (1 - NAME_SHARE)));
}

/** Return a cell of a run, or of a group: then `rows` are its runs. */
export function cell(column, row, rows, settings) {
  const content = column.key === "about" ? about(row, settings) : column.cell(row, rows);
  const hint = column.key === "about" ? aboutText(row, settings) : column.hint?.(row, rows);
  const shown = content === null || content === undefined || content === 0 || content === "" || content.length === 0 ? "–" : content;
  return h("td", { class: column.phone ? `${column.class} phone` : column.class, "data-label": column.label, "data-column": column.key, title: hint || null }, shown);
}

function progress(row) {
  const done = share(row), steps = row.total_steps ? `${text.whole(row.step)} of ${text.whole(row.total_steps)} steps` : `${text.whole(row.step)} steps`;
  return [bar(done, steps), h("small", {}, `${done === null ? "" : `${text.percent(done)} · `}${text.count(row.tokens)} tok`)];
}

function loss(row) {
  if (row.low === undefined || row.low === row.high) return text.number(row.loss);
  return [h("span", { title: "mean" }, text.number(row.loss)), h("small", { title: "range" }, `${text.number(row.low, 3)}–${text.number(row.high, 3)}`)];
}

function scores(row) {
  return scoresOf(row).slice(0, 2).map(([name, value]) => h("span", {}, h("small", {}, bdi(name)), h("span", {}, text.number(value, 3))));
}

const SVG = "http://www.w3.org/2000/svg";

/** Return a picture of a curve: a digit of base 36 for each height, a space where there is no value. */
function sparkline(heights) {
  if (!heights || heights.length < 2) return null;
  const picture = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  picture.setAttribute("viewBox", `0 0 ${heights.length - 1} 35`);
  for (const [name, value] of Object.entries({ preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" })) picture.setAttribute(name, value);
  const parts = [...heights].map((height, at) => (height === " " ? "" : `${at && heights[at - 1] !== " " ? "L" : "M"}${at} ${35 - parseInt(height, 36)}`));
  path.setAttribute("d", parts.join(""));
  picture.append(path);
  return picture;
}

/** Return the tags, the note and the settings without a column. */
function about(row, settings) {
  const tags = Object.entries(row.tags || {}).map(([key, value]) => h("span", { class: "tag" }, bdi(value ? `${key}=${value}` : key)));
  const problem = problemOf(row);
  return h("div", {}, problem && h("span", { class: "problem" }, bdi(problem), " "), tags, row.note && h("em", {}, bdi(row.note)),
    settings.map(({ says, hasColumn }) => h("span", { class: hasColumn ? "setting in-column" : "setting" }, bdi(says))));
}

const aboutText = (row, settings) => [settings.map(({ says }) => says).join(" "), row.note, problemOf(row)].filter(Boolean).join("\n");
const problemOf = (row) => row.problem || (row.needs_person ? row.what : null);

/**
 * Let a reader choose columns.
 * @param {object[]} shown - the columns that are shown now.
 * @param {object[]} rows - rows whose settings, tags and scores are offered.
 * @param {(keys: string) => void} choose - empty: the default columns.
 */
export function chooseColumns(shown, rows, choose) {
  const chosen = new Set(shown.map(({ key }) => key)), names = (kind, found) => [...new Set(found)].slice(0, MOST_OFFERED).map((name) => [`${kind}:${name}`, name]);
  const parts = [
    ["Columns", ALL.map(({ key, title }) => [key, title])],
    ["Settings that differ", names("set", varying(rows).map(({ key }) => key))],
    ["Tags", names("tag", rows.flatMap((row) => Object.keys(row.tags || {})).sort())],
    ["Scores", names("score", rows.flatMap((row) => Object.keys(row.scores || {})).sort())],
  ];
  const draw = () => fill(body, parts.filter(([, options]) => options.length).map(([title, options]) => h("fieldset", {}, h("legend", {}, title), options.map(([key, name]) =>
    check(bdi(name), chosen.has(key), (on) => {
      if (on) chosen.add(key);
      else chosen.delete(key);
      choose([...chosen].join(",") || "name");
    })))));
  const body = h("div", { class: "column-choice" });
  const reset = () => {
    chosen.clear();
    for (const { key } of choose("")) chosen.add(key);
    draw();
  };
  const dialog = openDialog("Columns", body, h("div", { class: "dialog-buttons" },
    h("button", { type: "button", onclick: reset }, "Default columns"), h("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  draw();
}
