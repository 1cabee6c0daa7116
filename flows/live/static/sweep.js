/** One sweep: its arms, best first, its trials, and figures of what each setting does. */

import { get } from "./api.js";
import { Chart, faint, isDark, stroke, themeColours } from "./charts.js";
import { sweepControls } from "./control.js";
import { bar, bdi, chip, choice, fill, h, table } from "./dom.js";
import * as text from "./format.js";
import { escaped } from "./metrics.js";
import { MOST_COMPARED } from "./runs.js";
import { shared } from "./shared.js";
import { change, format } from "./state.js";
import { store } from "./store.js";

/** Shortest time between two readings of a sweep; one that runs is read again at least this often. */
const READ_MS = 3000, LIVE_MS = 6000;
/** Most arms that are lines of the parallel coordinates, the best ones. */
const MOST_LINES = 300;
/** Most values of an axis that are columns or rows of a heat map. */
const MOST_CELLS = 24;
/** Most arms between which levels are interpolated, the best ones: the browser's work grows with their square. */
const MOST_LEVELLED = 80;

export class SweepView {
  constructor(root, params, id) {
    Object.assign(this, { root, params, id, charts: [], details: null, readAt: 0 });
    fill(root, h("p", { class: "empty" }, "Loading the sweep."));
    this.load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    clearTimeout(this.liveTimer);
    for (const chart of this.charts) chart.close();
  }

  update(params) {
    this.params = params;
    if (this.details) this.draw();
  }

  /** Called when rows have changed. */
  rows(changed) {
    if (changed.some((row) => row.sweep === this.id)) this.soon();
  }

  soon() {
    this.timer ||= setTimeout(() => this.load(), Math.max(0, this.readAt + READ_MS - Date.now()));
  }

  again() {
    this.load();
  }

  themed() {
    if (this.details) this.draw();
  }

  async load() {
    clearTimeout(this.timer);
    clearTimeout(this.liveTimer);
    this.timer = 0;
    this.readAt = Date.now();
    try {
      const details = await get(`/api/sweeps/${encodeURIComponent(this.id)}`);
      if (this.closed) return;
      // No row of a run changes when the sweep itself ends.
      if (!shared && ["created", "running", "stopping"].includes(details.status)) this.liveTimer = setTimeout(() => this.load(), LIVE_MS);
      if (JSON.stringify(details) === JSON.stringify(this.details)) return fill(this.trials, trials(details));
      this.details = details;
      this.draw();
    } catch (error) {
      if (this.closed || this.details) return;
      fill(this.root, h("p", { class: "problem" }, error.message), h("p", {}, error.hint), h("p", {}, h("a", { href: "#/runs" }, "Show all runs")));
    }
  }

  draw() {
    const { details } = this;
    document.title = `${details.name || details.sweep_id} · hlatctl`;
    for (const chart of this.charts) chart.close();
    this.charts = [];
    const figures = h("div", { class: "charts" });
    const add = (title, found, options) => {
      if (!found) return;
      const chart = new Chart(title, options);
      this.charts.push(chart);
      figures.append(chart.node);
      chart.draw(found.traces, { label: title, ...found }).catch((error) => { chart.plot.textContent = error.message; });
    };
    const varied = details.axes.map((axis) => axis.key).filter((key) => new Set(details.arms.map((arm) => arm.point[key])).size > 1);
    const isLadder = details.target !== null;
    add("Forecast and result", forecast(details), { tall: true });
    if (!isLadder) {
      add("Settings and objective of each arm", parallel(details, varied), { tall: true });
      add("Best so far", progress(details));
    }
    add("Objective during training", rungs(details));
    add("Importance of the settings", importance(details));
    const pair = this.pair(varied);
    if (!isLadder) add(pair.join(" and "), pair.length === 2 && surface(details, ...pair));
    fill(this.root, heading(details), facts(details), this.buttons(), this.table(varied), !isLadder && varied.length > 2 && this.pickers(varied, pair), figures, this.trials = h("div", {}, trials(details)));
  }

  /** The two settings of the last figure: those of the address, or the first ones. */
  pair(varied) {
    const one = varied.includes(this.params.one) ? this.params.one : varied[0];
    const two = varied.includes(this.params.two) && this.params.two !== one ? this.params.two : varied.find((key) => key !== one);
    return [one, two].filter(Boolean);
  }

  pickers(varied, [one, two]) {
    const options = varied.map((key) => [key, key]), set = (name) => (value) => this.update(change({ [name]: value }));
    return h("div", { class: "controls" }, choice("Figure of", options, one, set("one")), choice("and", options, two, set("two")));
  }

  buttons() {
    const { details } = this, best = details.target !== null ? [] : details.arms.flatMap((arm) => arm.trials.slice(0, 1)).slice(0, 5).map((number) => runOf(details, number));
    const all = details.trials.map((trial) => trial.run_id).slice(0, MOST_COMPARED);
    const compare = (runs, title) => runs.length > 1 && h("a", { class: "button", href: format({ view: "compare", params: { runs: runs.join(",") } }) }, title);
    return h("div", { class: "links" }, sweepControls(details, () => this.load()), compare(best, `Compare the best ${best.length}`), all.length > best.length && compare(all, `Compare the first ${all.length} trials`),
      details.links.report && h("a", { class: "button", href: details.links.report, target: "_blank", rel: "noopener" }, "Report"));
  }

  table(varied) {
    const { details } = this, same = details.axes.map((axis) => axis.key).filter((key) => !varied.includes(key));
    const isLadder = details.target !== null;
    const rows = details.arms.map((arm, index) => [
      h(arm.mean !== null && index === 0 && !isLadder ? "strong" : "span", {}, arm.arm === details.target ? "target" : text.whole(arm.arm)), ...varied.map((key) => bdi(arm.point[key] ?? "–")),
      text.score({ value: arm.mean, stderr: arm.stderr }), isLadder ? deviation(details, arm) : difference(arm),
      arm.trials.map((number) => trialLink(details, details.trials.find((trial) => trial.number === number))),
    ]);
    return h("section", {}, h("h2", {}, isLadder ? "Rungs and target" : "Arms, best first"),
      same.length > 0 && details.arms.length > 0 && h("p", { class: "summary" }, `The same in all: ${same.map((key) => `${key}=${details.arms[0].point[key]}`).join(", ")}.`),
      rows.length ? table(isLadder ? "Rungs" : "Arms", [isLadder ? "rung" : "arm", ...varied.map((key) => h("code", {}, bdi(key))), bdi(details.objective), isLadder ? "deviation from the law" : "difference from best", "trials"], rows, { class: "short" })
        : h("p", { class: "empty" }, "No trial has been created yet."));
  }
}

const runOf = (details, number) => details.trials.find((trial) => trial.number === number).run_id;

function trialLink(details, trial) {
  return h("span", { class: "trial" }, h("a", { href: format({ view: "run", id: trial.run_id }) }, bdi(`t${String(trial.number).padStart(4, "0")}`)), " ", chip(trial.status), " ");
}

function difference({ difference: gap, difference_stderr: stderr }) {
  if (gap === null) return "–";
  const sign = gap > 0 ? "+" : "";
  return stderr === null ? `${sign}${text.number(gap, 3)}` : `${sign}${text.number(gap, 3)} ± ${text.number(stderr, 2)}${Math.abs(gap) < 2 * stderr ? " (not distinguishable)" : ""}`;
}

function heading(details) {
  const ended = details.trials.filter((trial) => trial.ended_unix_s !== null).length, planned = Math.max(details.trials_planned, details.trials.length), says = `${ended} of ${text.counted(planned, "trial")} have ended`;
  return h("header", { class: "run-header" }, h("div", { class: "heading" }, h("h1", {}, details.target === null ? "Sweep " : "Ladder ", bdi(details.name || details.sweep_id)), chip(details.status),
    details.simulated && h("span", { class: "mark" }, "simulated: nothing was trained")),
  h("p", { class: "about" }, details.name && bdi(`${details.sweep_id} · `), says, bar(planned ? ended / planned : 0, says)));
}

function facts({ facts: known, tags, notes }) {
  const labels = Object.entries(tags).map(([key, value]) => (value ? `${key}=${value}` : key)).join(", ");
  const found = [...known, ...(labels ? [["tags", labels]] : []), ...notes.map((note) => ["note", note.text])];
  return h("dl", { class: "facts" }, found.map(([name, value]) => h("div", {}, h("dt", {}, bdi(name)), h("dd", {}, bdi(value)))));
}

/** Tokens and loss of a trial that has not ended are those of its run. */
function trials(details) {
  const rows = details.trials.map((trial) => {
    const row = store.rows.get(trial.run_id), hasEnded = trial.ended_unix_s !== null;
    return [
      h("a", { href: format({ view: "run", id: trial.run_id }) }, bdi(trial.run_id)), text.whole(trial.arm), trial.seed === null ? "–" : text.whole(trial.seed), chip(trial.status),
      text.number(trial.value), text.number(row?.loss), text.count(hasEnded || !row ? trial.tokens : row.tokens), hasEnded ? text.duration(3600 * trial.process_hours) : "–", bdi(trial.why || "–"),
    ];
  });
  const heads = ["trial", "arm", "seed", "status", "objective", "newest loss", "tokens", h("span", { title: "summed over the trial's processes" }, "process time"), "reason"];
  return rows.length > 0 && h("section", {}, h("h2", {}, "Trials"), table("Trials", heads, rows, { class: "short" }));
}

/** How far a rung's final loss, or that of the target, is from the law. */
function deviation({ forecast: made, target, trials: all }, arm) {
  if (!made || arm.mean === null) return "–";
  const rung = made.rungs.find((each) => all.some((trial) => trial.number === each.trial && trial.arm === arm.arm));
  const fitted = arm.arm === target ? made.loss.value : rung?.fitted, share = fitted ? 100 * (arm.mean / fitted - 1) : null;
  return share === null ? "–" : `${share > 0 ? "+" : ""}${share.toFixed(2)} %`;
}

/** Final losses of a ladder's rungs by compute, the law with its band, and the target's forecast and result. */
function forecast({ forecast: made, objective }) {
  if (!made) return null;
  const { color } = stroke(0), at = made.curve.map((point) => point.flops), of = (name) => made.curve.map((point) => point[name]);
  const line = { type: "scatter", mode: "lines", x: at, line: { width: 0, color }, hoverinfo: "skip", showlegend: false };
  const { value, low, high } = made.loss, hasBand = low !== null, goal = [made.target.flops];
  const bars = hasBand && { type: "data", symmetric: false, array: [high - value], arrayminus: [value - low] };
  return {
    traces: [
      ...(hasBand ? [{ ...line, y: of("low") }, { ...line, y: of("high"), fill: "tonexty", fillcolor: faint(color, 0.18) }] : []),
      { type: "scatter", mode: "lines", name: "law", x: at, y: of("value"), line: { color } },
      { type: "scatter", mode: "markers", name: "rungs", x: made.rungs.map((rung) => rung.flops), y: made.rungs.map((rung) => rung.loss), marker: { color, size: 8 } },
      { type: "scatter", mode: "markers", name: "forecast", x: goal, y: [value], ...(bars && { error_y: bars }), marker: { color: stroke(1).color, size: 9, symbol: "diamond" } },
      ...(made.results.length ? [{ type: "scatter", mode: "markers", name: "result", x: made.results.map(() => goal[0]), y: made.results, marker: { color: stroke(2).color, size: 12, symbol: "star" } }] : []),
    ],
    x: { title: "training compute, FLOPs", type: "log", exponentformat: "power" }, y: { title: escaped(objective), type: "log" }, layout: { hovermode: "closest" },
  };
}

/** A colour between grey (the worst) and the accent (the best). */
function shade(share) {
  const [from, to] = isDark() ? [[70, 80, 94], [74, 163, 223]] : [[205, 210, 217], [0, 114, 178]];
  return `rgb(${from.map((part, index) => Math.round(part + (to[index] - part) * share)).join(",")})`;
}

const numeric = (values) => values.every((value) => value !== "" && Number.isFinite(Number(value)));

/** The place of a setting's values from 0 to 1, and its labels. Numbers of several sizes are placed by their logarithm. */
function scale(values) {
  const known = [...new Set(values.map(String))];
  if (!numeric(known)) {
    const sorted = known.sort(), last = Math.max(1, sorted.length - 1);
    return { at: (value) => sorted.indexOf(value) / last, ticks: sorted.map((value, index) => [index / last, value]) };
  }
  const numbers = known.map(Number).sort((a, b) => a - b), low = numbers[0], high = numbers.at(-1), isLog = low > 0 && high / low >= 20;
  const place = isLog ? Math.log : Number, span = place(high) - place(low) || 1;
  const at = (value) => (place(Number(value)) - place(low)) / span;
  const shown = numbers.length <= 7 ? numbers : [low, isLog ? Math.sqrt(low * high) : (low + high) / 2, high];
  return { at, ticks: shown.map((value) => [at(value), String(Number(value.toPrecision(4)))]) };
}

/** A line for each arm through its settings and its objective. */
function parallel(details, varied) {
  const arms = details.arms.filter((arm) => arm.mean !== null).slice(0, MOST_LINES);
  if (arms.length < 2 || !varied.length) return null;
  const keys = [...varied, details.objective], valueOf = (arm, key) => (key === details.objective ? arm.mean : arm.point[key]);
  const scales = keys.map((key) => scale(arms.map((arm) => valueOf(arm, key))));
  const traces = arms.map((arm, rank) => ({
    type: "scatter", mode: "lines", x: keys.map((_, index) => index), y: keys.map((key, index) => scales[index].at(valueOf(arm, key))), hoverinfo: "text",
    text: `arm ${arm.arm}<br>${keys.map((key) => `${escaped(key)}: ${escaped(key === details.objective ? text.number(arm.mean) : arm.point[key])}`).join("<br>")}`,
    line: { color: shade(1 - rank / Math.max(1, arms.length - 1)), width: rank === 0 ? 3 : 1.4 },
  })).reverse();
  const label = (x, y, words, more) => ({ x, y, text: escaped(words), showarrow: false, xanchor: "left", xshift: 5, font: { size: 10 }, bgcolor: faint(themeColours().panel, 0.75), ...more });
  const ticks = scales.flatMap(({ ticks: found }, index) => found.map(([y, words]) => label(index, y, words)));
  const last = (key) => key.split(".").at(-1), titleOf = (key) => (keys.filter((each) => last(each) === last(key)).length > 1 ? key : last(key));
  const names = keys.map((key, index) => label(index, 1.09, titleOf(key), { xanchor: index === 0 ? "left" : index === keys.length - 1 ? "right" : "center", xshift: 0, font: { size: 11 } }));
  const line = { color: faint("#8a8f98", 0.7), width: 1 };
  return {
    traces, shapes: keys.map((_, index) => ({ type: "line", x0: index, x1: index, y0: 0, y1: 1, line })),
    x: { range: [-0.05, keys.length - 0.75], visible: false }, y: { range: [-0.05, 1.16], visible: false }, layout: { annotations: [...ticks, ...names], hovermode: "closest" },
  };
}

/** The objective of each trial in the order of their creation, and the best one so far. */
function progress(details) {
  const ended = details.trials.filter((trial) => trial.value !== null), isMax = details.direction === "max";
  if (ended.length < 2) return null;
  let best = null;
  const bests = ended.map(({ value }) => { best = best === null || (isMax ? value > best : value < best) ? value : best; return best; });
  const base = { type: "scatter", x: ended.map((trial) => trial.number) }, { color } = stroke(0);
  return {
    traces: [{ ...base, mode: "markers", name: "trial", y: ended.map((trial) => trial.value), marker: { color: faint(color, 0.6), size: 7 } },
      { ...base, mode: "lines", name: "best so far", y: bests, line: { color: stroke(1).color, shape: "hv" } }],
    x: { title: "trial", whole: true }, y: { title: escaped(details.objective) },
  };
}

/** The objective of each trial at its rungs; pruned ones end early. */
function rungs(details) {
  const shown = details.trials.filter((trial) => trial.rungs.length > 1);
  if (!shown.length) return null;
  const rank = new Map(details.arms.map((arm, index) => [arm.arm, index])), last = Math.max(1, details.arms.length - 1);
  return {
    traces: shown.map((trial) => ({
      type: "scatter", mode: "lines+markers", name: escaped(trial.run_id), x: trial.rungs.map(([tokens]) => tokens), y: trial.rungs.map(([, value]) => value),
      line: { color: shade(1 - (rank.get(trial.arm) ?? last) / last), dash: trial.status === "finished" ? "solid" : "dot", width: 1.4 }, marker: { size: 4 },
    })),
    x: { title: "tokens", exponentformat: "B" }, y: { title: escaped(details.objective) }, layout: { hovermode: "closest" },
  };
}

/** The share of the objective's variance that each setting explains. */
function importance({ importances }) {
  const found = Object.entries(importances).sort(([, a], [, b]) => a - b);
  if (!found.length) return null;
  return {
    traces: [{ type: "bar", orientation: "h", x: found.map(([, share]) => 100 * share), y: found.map(([key]) => escaped(key)), marker: { color: stroke(0).color }, hovertemplate: "%{x:.1f} %" }],
    x: { title: "percent of the variance (fANOVA, from the report)", rangemode: "tozero" }, y: { type: "category" }, layout: { hovermode: "closest" },
  };
}

/** The best objective for each pair of two settings: a heat map of few values, or points with levels between them. */
function surface(details, one, two) {
  const arms = details.arms.filter((arm) => arm.mean !== null);
  if (arms.length < 3) return null;
  const colorscale = [[0, shade(details.direction === "max" ? 0 : 1)], [1, shade(details.direction === "max" ? 1 : 0)]];
  const values = (key) => [...new Set(arms.map((arm) => arm.point[key]))].sort((a, b) => (numeric([a, b]) ? a - b : a < b ? -1 : 1));
  const xs = values(one), ys = values(two), colorbar = { title: { text: escaped(details.objective), side: "right" }, thickness: 10, outlinewidth: 0 };
  const titles = { x: { title: escaped(one) }, y: { title: escaped(two) }, layout: { hovermode: "closest" } };
  if (xs.length > MOST_CELLS || ys.length > MOST_CELLS) {
    const isLog = (list) => numeric(list) && Number(list[0]) > 0 && list.at(-1) / list[0] >= 20;
    const kind = (list) => (numeric(list) ? (isLog(list) ? "log" : "linear") : "category");
    const some = arms.slice(0, MOST_LEVELLED), points = (list, key) => list.map((arm) => (numeric([arm.point[key]]) ? Number(arm.point[key]) : arm.point[key]));
    const levels = numeric(xs) && numeric(ys) && {
      type: "contour", x: points(some, one), y: points(some, two), z: some.map((arm) => arm.mean), connectgaps: true, colorscale, showscale: false, hoverinfo: "skip", opacity: 0.55, line: { width: 0.5, smoothing: 1 }, ncontours: 12,
    };
    return {
      traces: [...(levels ? [levels] : []), {
        type: "scatter", mode: "markers", x: points(arms, one), y: points(arms, two), text: arms.map((arm) => `arm ${arm.arm}: ${text.number(arm.mean)}`), hoverinfo: "text",
        marker: { color: arms.map((arm) => arm.mean), colorscale, colorbar, size: 9, line: { width: 1, color: "#00000060" } },
      }],
      ...titles, x: { ...titles.x, type: kind(xs) }, y: { ...titles.y, type: kind(ys) },
    };
  }
  const at = (x, y) => arms.find((arm) => arm.point[one] === x && arm.point[two] === y)?.mean ?? null;  // arms are best first
  const z = ys.map((y) => xs.map((x) => at(x, y)));
  return {
    traces: [{
      type: "heatmap", x: xs.map(escaped), y: ys.map(escaped), z, colorscale, colorbar, text: z.map((row) => row.map((value) => (value === null ? "" : text.number(value)))),
      texttemplate: xs.length * ys.length <= 64 ? "%{text}" : "", hovertemplate: "%{x}, %{y}: %{text}<extra></extra>", xgap: 2, ygap: 2,
    }],
    ...titles, x: { ...titles.x, type: "category" }, y: { ...titles.y, type: "category" },
  };
}
