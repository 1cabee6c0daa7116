/** Tables of a comparison: scores against published ones, and the settings that differ. */

import { get } from "./api.js";
import { Chart, LEGEND, stroke, symbolOf, themeColours } from "./charts.js";
import { bdi, choice, fill, h, keyName, nobr, runLink, table } from "./dom.js";
import * as text from "./format.js";
import { escaped } from "./metrics.js";

/** Why a score is not ranked, by remark. */
const REMARKS = {
  another_contract: "measured under another contract; not ranked", contract_unknown: "its contract is unknown; not ranked",
  simulated: "simulated; not ranked", published_otherwise: "published for other shots or items; not ranked",
  published: "as published", imported: "imported; what is known of it agrees with the leftmost run",
  imported_contract_unknown: "imported, contract unknown; not ranked",
};
const STANDINGS = { best: "best, beyond the error of every other", tie: "not distinguishable from the best" };
/** Marks of scores, as in the tables of `hlatctl compare`. */
const MARKS = { another_contract: "†", contract_unknown: "‡", simulated: "§", published_otherwise: "¶", imported: "#", imported_contract_unknown: "‖" };
/** Patterns of bars in the place of markers. */
const PATTERNS = { "": "", circle: ".", square: "x", "triangle-up": "\\" };
/** Most groups of bars in the chart. */
const MOST_BARS = 12;

/** Return the table of settings that differ. */
export function settings({ runs, config }) {
  const none = runs.length > 1 ? "No setting differs." : "Select a second run to see which settings differ.";
  if (!config.length || runs.length < 2) return h("section", {}, h("h2", {}, "Settings"), h("p", { class: "empty" }, none));
  const rows = config.map(({ key, values }) => [keyName(key), ...values.map((value) => bdi(text.setting(value), { class: "value" }))]);
  return h("section", {}, h("h2", {}, "Settings that differ"), table("Settings that differ", ["setting", ...runs.map((row) => runLink(row))], rows, { class: "wide" }));
}

/**
 * Return the scores as a table and a chart: `{node, draw, close}`.
 * @param {string} chosen - the shown set of published scores.
 * @param {(name: string) => void} choose
 */
export function drawScores({ runs, scores, baselines, published, notes }, chosen, choose) {
  const names = published.length > 0 && choice("Published scores", [["", "none"], ...published.map((each) => [each, each])], chosen, choose);
  const node = h("section", {}, h("h2", {}, "Scores"), h("div", { class: "controls" }, names));
  if (!scores.some((row) => row.values.some(Boolean))) {
    node.append(h("p", { class: "empty" }, "None of these runs has an evaluated milestone."));
    return { node, draw() {}, close() {} };
  }
  const chart = new Chart("Scores with standard errors", { tall: true });
  const own = scores.filter((row) => row.headline && row.unit === "percent" && row.values.some(Boolean)).slice(0, MOST_BARS);
  const draw = () => chart.draw(bars(own, runs, baselines), {
    x: { type: "category" }, y: { title: "percent", rangemode: "tozero" },
    layout: { barmode: "group", hovermode: "closest", showlegend: true, legend: LEGEND },
  }).catch(() => {});
  if (own.length) draw();
  chart.node.hidden = !own.length;
  const rows = scores.map((row) => [h("span", { title: row.section }, bdi(titleOf(row))), nobr(row.metric), guessing(row), ...row.values.map(cell), ...baselines.map((name) => cell(row.baselines[name]))]);
  node.append(chart.node, table("Scores", ["task", "metric", "guessing", ...runs.map((row) => runLink(row)), ...baselines.map((name) => bdi(name))], rows, { class: "wide" }),
    h("p", {}, h("small", {}, legend(scores))), h("ul", { class: "plain" }, notes.map((note) => h("li", {}, h("small", {}, bdi(note))))));
  return { node, draw: () => own.length && draw(), close: () => chart.close() };
}

/** The score of guessing, which is that of the leftmost run. */
const guessing = (row) => {
  const known = row.values.find((each) => each && each.chance !== null);
  return known ? text.number(known.chance) : "–";
};

const titleOf = (row) => (row.part ? `${row.task}: ${row.part}` : row.task);

/** What the marks in the table mean, as far as they occur. */
function legend(scores) {
  const cells = scores.flatMap((row) => [...row.values, ...Object.values(row.baselines)]).filter(Boolean), has = (test) => cells.some(test);
  return [
    has((each) => each.standing === "best") && `bold: ${STANDINGS.best}`, has((each) => each.standing === "tie") && `≈: ${STANDINGS.tie}`,
    ...Object.entries(MARKS).map(([remark, mark]) => has((each) => each.remark === remark) && `${mark}: ${REMARKS[remark]}`),
  ].filter(Boolean).join(" · ");
}

/** One score: the best one of its row is bold, and what can't be ranked is pale and has a mark. */
function cell(value) {
  if (!value) return "–";
  const why = [STANDINGS[value.standing], REMARKS[value.remark], value.n && `${text.whole(value.n)} items`].filter(Boolean).join("; ");
  const unranked = value.remark && value.remark !== "published";
  return h(value.standing === "best" ? "strong" : "span", { title: why, class: unranked ? "nobr unranked" : "nobr" },
    text.score(value), value.standing === "tie" && " ≈", MARKS[value.remark] && ` ${MARKS[value.remark]}`);
}

/** Two of the runs question by question: what differs by more than chance. It is computed when it is asked for. */
export class PairedPanel {
  constructor(runs) {
    const options = runs.map((run) => [run.run_id, run.name || run.run_id]);
    Object.assign(this, { names: new Map(options), first: runs[0]?.run_id, second: runs[1]?.run_id });
    this.found = h("div", {});
    this.node = h("section", {}, h("h2", {}, "Question by question"), h("div", { class: "controls" },
      choice("Compare", options, this.second, (id) => { this.second = id; }), choice("with", options, this.first, (id) => { this.first = id; }),
      h("button", { type: "button", onclick: () => this.load() }, "Test")), this.found);
    this.node.hidden = runs.length < 2;
  }

  async load() {
    fill(this.found, h("p", { class: "empty", role: "status" }, "Reading the answers to each question. A large suite takes some seconds."));
    try {
      this.draw(await get("/api/paired", { runs: `${this.first},${this.second}` }));
    } catch (error) {
      fill(this.found, h("p", { class: "problem" }, `${error.message} ${error.hint || ""}`));
    }
  }

  draw({ rows, left_out: leftOut, notes }) {
    const signed = (value) => `${value > 0 ? "+" : ""}${text.number(value, 3)}`;
    const says = (row) => (row.is_real ? h("strong", {}, row.second > row.first ? "higher" : "lower") : "not distinguishable");
    const doubt = (row) => [row.contracts !== "equal" && `contracts ${row.contracts}`, row.reworded > 0 && `${text.counted(row.reworded, "question")} with other prompts`].filter(Boolean).join("; ") || "–";
    const cells = rows.map((row) => [bdi(row.name), bdi(row.metric), text.whole(row.items), text.number(row.first), text.number(row.second), `${signed(row.second - row.first)} (${signed(row.low)} to ${signed(row.high)})`,
      `${text.whole(row.gained)}, ${text.whole(row.lost)}`, text.number(row.holm, 2), says(row), doubt(row)]);
    const missing = [...notes, ...Object.entries(leftOut).map(([name, why]) => `${name} is left out: ${why}`)];
    fill(this.found, rows.length ? table("Question by question", ["task", "metric", "questions", ...[this.first, this.second].map((id) => bdi(this.names.get(id))), "difference (95 % interval)", "better, worse", "p (Holm)", "verdict", "doubts"], cells, { class: "wide" })
      : h("p", { class: "empty" }, "These runs have no questions in common. Items are kept by evaluations of this machine, and by imports that have them."),
    h("ul", { class: "plain" }, missing.map((line) => h("li", {}, h("small", {}, bdi(line))))));
  }
}

function bars(scores, runs, baselines) {
  const tasks = scores.map((row) => escaped(titleOf(row)));
  const trace = (name, cells, marker) => ({
    type: "bar", name: escaped(name), x: tasks, y: cells.map((each) => each?.value ?? null), marker,
    error_y: { type: "data", array: cells.map((each) => each?.stderr ?? 0), thickness: 1, color: themeColours().text },
  });
  const own = runs.map((run, index) => trace(run.name || run.run_id, scores.map((row) => row.values[index]), { color: stroke(index).color, pattern: { shape: PATTERNS[symbolOf(index)] } }));
  const published = baselines.map((name, index) => {
    const { color } = stroke(index + runs.length);
    return trace(name, scores.map((row) => row.baselines[name]), { color: "transparent", line: { color, width: 1.5 }, pattern: { shape: "/", fgcolor: color } });
  });
  return [...own, ...published.filter((each) => each.y.some((value) => value !== null))];
}
