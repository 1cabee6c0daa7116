/** Live curves of one run. */

import { get, runPath } from "./api.js";
import { AXES, Chart, faint, stroke, xAxis } from "./charts.js";
import { Curves, lowerBound, valueAt, withoutStart } from "./curves.js";
import { check, choice, fill, h } from "./dom.js";
import * as text from "./format.js";
import { RankTimes } from "./ranks.js";
import { escaped, isSteep, ordered, titled, titleOf, traces } from "./metrics.js";
import { range } from "./state.js";

/** Shortest time between two readings of new steps. */
const GROW_MS = 1000;
/** Most restarts and amendments that tell what they were, the newest ones. */
const MOST_SAID = 200;

export class CurvesTab {
  constructor(root, id, params, change) {
    Object.assign(this, { root, id, params, setParams: change, charts: new Map(), details: null, zoomed: "" });
    this.axis = params.x in AXES ? params.x : "step";
    this.curves = new Curves(id, this.axis, []);
    this.build();
    this.load();
  }

  build() {
    this.smoothing = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.params.smooth || "0", "aria-label": "Smoothing",
      oninput: () => this.change({ smooth: this.smoothing.value === "0" ? "" : this.smoothing.value }),
    });
    this.smoothingText = h("output", {});
    this.legend = h("small", {});
    this.reset = h("button", { type: "button", onclick: () => this.change({ zoom: "" }) }, "Reset zoom");
    this.message = h("p", { class: "empty", role: "status" }, "Loading curves.");
    this.plots = h("div", { class: "charts" });
    fill(this.root, h("div", { class: "controls" },
      choice("Over", [["step", "steps"], ["tokens", "tokens"], ["time", "time"], ["flops", "FLOPs"]], this.axis, (x) => this.change({ x, zoom: "" })),
      h("label", { class: "field" }, h("span", {}, "Smoothing"), this.smoothing, this.smoothingText),
      check("log y", this.params.logy === "1", (on) => this.change({ logy: on ? "1" : "" })),
      check("first steps in range", this.params.start === "1", (on) => this.change({ start: on ? "1" : "" })), this.reset,
      this.legend), this.message, this.plots);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    for (const chart of this.charts.values()) chart.close();
    if (this.heat) this.heat.close();
  }

  change(changes) {
    this.setParams(changes);
    this.update({ ...this.params, ...changes });
  }

  update(params) {
    const axis = params.x in AXES ? params.x : "step";
    this.params = params;
    if (axis !== this.axis) {
      this.axis = axis;
      this.zoomed = "";
      this.curves = new Curves(this.id, axis, []);
      this.load();
    } else this.refresh();
  }

  async load() {
    try {
      await this.curves.load();
    } catch (error) {
      this.message.textContent = `${error.message} ${error.hint || ""}`;
      return;
    }
    await this.refresh();
    this.drawHeat();
  }

  show(details) {
    const restarts = (each) => JSON.stringify([each?.attempts.map((a) => a.from_step), each?.milestones, each?.amendments]);
    const changed = restarts(this.details) !== restarts(details);
    this.details = details;
    if (changed) this.draw();
  }

  /** Read new steps, at most once a second. */
  grow(fromStep) {
    this.fromStep = Math.min(this.fromStep ?? Infinity, fromStep ?? Infinity);
    this.timer ||= setTimeout(async () => {
      this.timer = 0;
      const from = Number.isFinite(this.fromStep) ? this.fromStep : null;
      this.fromStep = undefined;
      await this.curves.extend(from).catch(() => {});
      if (!this.closed) this.draw();
    }, GROW_MS);
  }

  themed() {
    this.draw();
    this.drawHeat();
  }

  async refresh() {
    this.draw();
    const zoom = this.params.zoom || "";
    if (zoom === this.zoomed) return;
    this.zoomed = zoom;
    await this.curves.zoom(range(zoom)).catch((error) => { this.message.textContent = error.message; });
    if (!this.closed) this.draw();
  }

  draw() {
    const { data } = this.curves;
    if (!data || this.closed) return;
    this.smoothing.value = this.params.smooth || "0";
    this.smoothingText.textContent = Number(this.params.smooth || 0).toFixed(2);
    this.legend.textContent = this.occurring(data).join(" · ");
    this.reset.hidden = !this.params.zoom;
    const empty = data.steps.length === 0, marks = this.marks(data);
    this.message.textContent = empty ? "No step has been trained yet." : "";
    const recorded = (key) => data.series[key] && data.series[key].y.some((y) => y !== null);
    for (const key of ordered(data.available).filter((each) => each !== "validation_loss" && recorded(each))) this.drawChart(key, data, marks);
  }

  drawChart(key, data, marks) {
    if (!this.charts.has(key)) {
      const chart = new Chart(titled(key), { tall: key === "loss", onZoom: ({ x }) => this.zoom(x) });
      this.charts.set(key, chart);
      this.plots.append(chart.node);
    }
    const weight = Number(this.params.smooth || 0), line = stroke(0);
    const lines = traces(data, key, line, { weight });
    if (key === "loss") lines.push(...traces(data, "validation_loss", stroke(1)), ...milestones(data, stroke(4)));
    if (key === "loss" || key === "grad_norm") lines.push(...skipped(data, key, stroke(1)));
    if (key === "grad_norm") lines.push(...spikes(data, stroke(3)));
    const newest = data.series[key].y.findLast((y) => y !== null);
    this.charts.get(key).draw(lines, {
      x: xAxis(this.axis, { range: range(this.params.zoom) || ends(data.xs) }),
      y: { type: this.params.logy === "1" ? "log" : "linear", range: this.cut(key, data), exponentformat: key === "tokens_per_s" ? "B" : "e" },
      shapes: [...marks.shapes, ...(key === "grad_norm" ? this.clipping() : [])], layout: { annotations: marks.annotations }, label: `${titleOf(key)} over ${AXES[this.axis]}; newest value ${text.number(newest)}`,
    }).catch((error) => { this.message.textContent = error.message; });
  }

  /** The y range without the run's first steps, unless the whole range is asked for. */
  cut(key, data) {
    if (!isSteep(key) || this.params.start === "1" || this.params.zoom) return null;
    const { y, low, high } = data.series[key];
    return withoutStart([y, low, high]);
  }

  /** What the marks of the charts mean, as far as they occur. */
  occurring(data) {
    const { attempts = [], amendments = [] } = this.details || {}, loss = data.series.loss;
    return [
      data.milestones.length > 0 && (data.series.validation_loss ? "◆ milestone, orange with its validation loss" : "◆ milestone"),
      attempts.length > 1 && "dashed: restart", amendments.length > 0 && "dotted: amendment", (data.skipped || []).length > 0 && "× skipped step",
      (data.spikes || []).length > 0 && "▲ spike by HLAT's rule", this.clipping().length > 0 && "line across the gradient norm: clipping",
      loss?.y.some((y, index) => y !== null && loss.low[index] < loss.high[index]) && "shaded: range of the steps of a point",
    ].filter(Boolean);
  }

  /** Restarts and amendments: the step after them, the dash of their line, and what they were. */
  get changes() {
    if (!this.details) return [];
    const { attempts, amendments } = this.details;
    const lost = (each) => (each.lost_tokens ? `, lost ${text.count(each.lost_tokens)} tokens` : "");
    const restarts = attempts.slice(1).map((each, index) => [each.from_step, "dash", `attempt ${each.attempt}, after ${attempts[index].cause || "an unknown end"}${lost(attempts[index])}`]);
    const keys = (each) => each.changes.map(({ key, before, after }) => `${key}: ${text.setting(before)} → ${text.setting(after)}`).join("<br>");
    return [...restarts, ...amendments.map((each) => [each.from_step, "dot", `amendment<br>${keys(each)}`])].filter(([step]) => step !== null);
  }

  /** Vertical lines, and a mark at their top that says more. */
  marks(data) {
    const shown = this.changes.filter(([step]) => step >= data.steps[0] && step <= data.steps.at(-1)).map(([step, dash, says]) => [data.xs[Math.min(data.xs.length - 1, lowerBound(data.steps, step))], dash, says]);
    return {
      shapes: shown.map(([x, dash]) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, layer: "below", line: { color: faint("#8a8f98", 0.55), width: 1, dash } })),
      annotations: shown.slice(-MOST_SAID).map(([x, , says]) => ({ x, y: 1, yref: "paper", yanchor: "top", text: "▾", showarrow: false, font: { size: 11, color: "#8a8f98" }, hovertext: says.split("<br>").map(escaped).join("<br>") })),
    };
  }

  /** The norm to which gradients are clipped, as a line. */
  clipping() {
    const norm = Number(this.details?.config?.["optimizer.max_grad_norm"]);
    if (!(norm > 0)) return [];
    return [{ type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: norm, y1: norm, line: { color: stroke(1).color, width: 1 } }];
  }

  zoom(x) {
    if (x === undefined) return;
    this.change({ zoom: x ? x.map((end) => Number(end.toPrecision(7))).join(":") : "" });
  }

  /** The times of the ranks, where they are recorded. */
  async drawHeat() {
    const times = await get(runPath(this.id, "/ranks"), { points: 60 }).catch(() => null);
    if (this.closed || !times || times.steps.length < 2) return;
    this.heat ??= new RankTimes();
    this.plots.append(this.heat.node);
    this.heat.draw(times);
  }
}

const ends = (xs) => (xs.length > 1 ? [xs[0], xs.at(-1)] : null);

function milestones(data, { color }) {
  const scored = new Set(data.series.validation_loss?.xs);
  const shown = data.milestones.filter(({ x }) => x !== null && !scored.has(x));
  if (!shown.length || !data.series.loss) return [];
  return [{
    type: "scatter", mode: "markers", name: "milestone", x: shown.map(({ x }) => x),
    y: shown.map(({ x }) => valueAt(data.xs, data.series.loss.y, x)), text: shown.map(({ tokens }) => `${text.count(tokens)} tokens`),
    hovertemplate: "%{text}", marker: { color, size: 8, symbol: "diamond", line: { width: 1, color: "#00000080" } },
  }];
}

function spikes(data, { color }) {
  const found = data.spikes || [];
  if (!found.length) return [];
  return [{
    type: "scatter", mode: "markers", name: "spike", x: found.map(({ x }) => x), y: found.map(({ y }) => y),
    hovertemplate: "spike by HLAT's rule", marker: { color, size: 5, symbol: "triangle-up" },
  }];
}

function skipped(data, key, { color }) {
  const xs = data.skipped || [];
  if (!xs.length) return [];
  return [{
    type: "scatter", mode: "markers", name: "skipped", x: xs, y: xs.map((x) => valueAt(data.xs, data.series[key].y, x)),
    hovertemplate: "skipped step", marker: { color, size: 6, symbol: "x-thin", line: { width: 1.5, color } },
  }];
}
