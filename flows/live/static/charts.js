/** What all charts share: colours, axes, a frame, and one crosshair; and charts by Plotly, whose script is loaded with the first. */

import { fill, h } from "./dom.js";
import * as text from "./format.js";

/** Okabe and Ito's colours, which colour-blind people can tell apart; from the seventh on, dashes and markers tell them apart. */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DARK_COLOURS = ["#4aa3df", "#f08a4b", "#2fc795", "#e39cc4", "#f0b83a", "#8fd0f5"];
const DASHES = ["solid", "dash", "dot", "dashdot"], SYMBOLS = ["", "circle", "square", "triangle-up"];

export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Return the colour and dash of the line with this number. */
export function stroke(index) {
  const colours = isDark() ? DARK_COLOURS : COLOURS;
  return { color: colours[index % colours.length], dash: DASHES[Math.floor(index / colours.length) % DASHES.length] };
}

/** Return the marker of the line with this number; empty for those that differ by colour. */
export const symbolOf = (index) => SYMBOLS[Math.floor(index / COLOURS.length) % SYMBOLS.length];

/** Return a colour with an opacity. */
export function faint(colour, opacity) {
  return `${colour}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;
}

let loading = null;

function plotly() {
  loading ??= window.Plotly ? Promise.resolve(window.Plotly) : new Promise((resolve, reject) => {
    const script = h("script", { src: "/static/plotly.min.js", onload: () => resolve(window.Plotly) });
    script.addEventListener("error", () => {
      loading = null;
      script.remove();
      reject(new Error("The charts' script could not be loaded."));
    });
    document.head.append(script);
  });
  return loading;
}

/** Titles of the x axes. */
export const AXES = { tokens: "tokens", step: "steps", time: "hours", flops: "FLOPs" };

/** Return the settings of an x axis. */
export function xAxis(axis, more) {
  return { title: AXES[axis], whole: axis === "step", ...more };
}

/** A legend above a chart, which makes room for its lines. */
export const LEGEND = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };

/** Pixels around the pointer in which a mark counts as pointed at. */
const REACH_PX = 6;
/** How the keys change the width of the shown range; 0 shows all. */
const ZOOMS = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity };

/**
 * One vertical line through all charts of a view. Its node is a slider: the pointer, touch, or the arrow keys move it.
 *
 * It stands at points that the view sets; each chart shows its own values there.
 */
export class Crosshair {
  /** @param {(ends: number[]|null) => void} onZoom - called with the range that the keys ask for; null: all. */
  constructor(onZoom) {
    Object.assign(this, { onZoom, charts: new Set(), places: { x: [] }, describe: null, at: null, source: null });
    this.node = h("div", {
      class: "crosshair", role: "slider", tabindex: "0", "aria-label": "Crosshair", "aria-valuemin": "0", "aria-valuenow": "0",
      onkeydown: (event) => this.key(event), onblur: () => this.hide(),
    });
    this.hide();
  }

  /**
   * Set where it can stand; called whenever the charts are drawn.
   * @param {{x: number[], step?: number[]}} places - ascending positions on the charts' axes, by their names.
   * @param {(index: number, reach: number) => {says: string[], marks: string[]}} describe - a place in words, with the
   *   marks that are at most `reach` from it on the axis x.
   * @param {number[]} marked - indices of places that have a mark.
   */
  set(places, describe, marked = []) {
    const x = this.at === null ? null : this.places.x[this.at];
    Object.assign(this, { places, describe, marked });
    this.node.setAttribute("aria-valuemax", String(Math.max(0, places.x.length - 1)));
    if (x !== null) this.show(Math.min(lowerBound(places.x, x), places.x.length - 1), this.reach, this.source);
  }

  /** Move to the place that is nearest to a value of a chart's axis. */
  point(chart, value, reach) {
    const places = this.places[chart.along] || [];
    if (!places.length) return;
    const after = Math.min(lowerBound(places, value), places.length - 1), before = Math.max(0, after - 1);
    this.next = [value - places[before] < places[after] - value ? before : after, reach, chart];
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (this.next) this.show(...this.next);
    });
  }

  show(index, reach, source) {
    if (!this.describe || index < 0) return;
    const { x } = this.places, spacing = Math.max(x[index] - (x[index - 1] ?? x[index]), (x[index + 1] ?? x[index]) - x[index]);
    const { says, marks } = this.describe(index, reach ?? spacing / 2);
    fill(this.node, h("strong", {}, says[0]), says.slice(1).map((each) => h("span", {}, each)), marks.map((each) => h("em", {}, each)));
    Object.assign(this, { at: index, reach, span: reach ?? spacing / 2, source, marks });
    const values = [...this.charts].map((chart) => chart.cross(this.places[chart.along]?.[index] ?? null, this.span, marks)).filter(Boolean);
    this.node.setAttribute("aria-valuenow", String(index));
    this.node.setAttribute("aria-valuetext", [...says, ...marks, ...values].join(", "));
  }

  hide() {
    Object.assign(this, { at: null, next: null, source: null });
    const how = matchMedia("(pointer: coarse)").matches ? "Touch a chart to read its values." : "Point at a chart, or press ← → here, to read its values; + − zoom.";
    fill(this.node, h("span", {}, how));
    this.node.setAttribute("aria-valuetext", "not shown");
    for (const chart of this.charts) chart.cross(null);
  }

  /** Arrows move by one point, with Shift by ten; PageUp and PageDown to the next mark; + and - zoom; Escape hides it. */
  key(event) {
    const last = this.places.x.length - 1, [first, end] = this.visible();
    const at = this.at ?? Math.round((first + end) / 2), by = event.shiftKey ? 10 : 1;
    const to = {
      ArrowLeft: () => at - by, ArrowRight: () => at + by, Home: () => first, End: () => end,
      PageUp: () => this.marked.findLast((each) => each < at), PageDown: () => this.marked.find((each) => each > at),
    }[event.key];
    if (event.key === "Escape") this.hide();
    if (event.ctrlKey || event.metaKey || event.altKey || last < 0) return;
    if (event.key in ZOOMS) this.zoom(ZOOMS[event.key], this.places.x[at]);
    if (!to) return;
    event.preventDefault();
    this.show(Math.max(0, Math.min(last, to() ?? at)), undefined, null);
  }

  /** Make the shown range so many times as wide around a place, which stays where it is. */
  zoom(factor, x) {
    const { axis } = this;
    if (!axis) return;
    if (factor < 1 && this.visible()[1] - this.visible()[0] < 4) return;
    const at = axis.at(x), pixels = [axis.start, axis.start + axis.length].map((end) => at + factor * (end - at));
    this.onZoom(Number.isFinite(factor) ? pixels.map(axis.of) : null);
  }

  /** The x axis of a chart that is drawn. */
  get axis() {
    return [...this.charts].find((chart) => chart.scales && chart.along === "x")?.scales.x;
  }

  /** The first and the last place in the charts' range. */
  visible() {
    const { x } = this.places, { axis } = this;
    if (!axis) return [0, Math.max(0, x.length - 1)];
    const [low, high] = axis.ends;
    return [lowerBound(x, low), Math.max(0, Math.min(x.length, lowerBound(x, high) + 1) - 1)];
  }
}

/** Return a range without what is beyond the ends of sorted values; null if nothing of them would be left out. */
export function within(range, low, high) {
  return range && (range[0] > low || range[1] < high) ? [Math.max(range[0], low), Math.min(range[1], high)] : null;
}

/** Pixels between the places of two values and from them to values: `at` and `of`. */
export function scale(ends, log, start, length) {
  const inner = log ? (value) => Math.log10(Math.max(value, Number.MIN_VALUE)) : Number, [low, high] = ends.map(inner), by = length / (high - low || 1);
  return {
    ends, log, start, length, at: (value) => start + by * (inner(value) - low),
    of: (pixel) => { const value = low + (pixel - start) / by; return log ? 10 ** value : value; },
  };
}

/** A chart's head, and the crosshair on it. What draws in it sets `scales` (its axes x and y) and has `lines`. */
export class Frame {
  /**
   * @param {string} title
   * @param {object} options
   * @param {Crosshair} options.crosshair - of the view.
   * @param {string} options.along - which of the crosshair's places its x axis shows.
   * @param {Node[]} options.buttons - after the title.
   */
  constructor(title, { tall = false, crosshair = null, along = "x", buttons = [], role = "group" } = {}) {
    Object.assign(this, { crosshair, along, lines: [], scales: null });
    this.title = h("h2", {}, title);
    this.plot = h("div", { class: tall ? "plot tall" : "plot", role, "aria-label": title });
    this.values = h("div", { class: "values" });
    this.line = h("div", { class: "crosshair-line", hidden: true });
    this.frame = h("div", { class: "frame" }, this.plot, this.line);
    this.node = h("section", { class: "chart" }, h("div", { class: "chart-head" }, this.title, this.values, buttons), this.frame);
    this.observer = new ResizeObserver(([{ contentRect }]) => this.resized(contentRect));
    this.observer.observe(this.plot);
    this.watcher = new IntersectionObserver((entries) => this.seen(entries.at(-1).isIntersecting), { rootMargin: "200px" });
    this.watcher.observe(this.plot);
    this.plot.chart = this;
    if (crosshair) this.follow();
  }

  follow() {
    this.crosshair.charts.add(this);
    const pointed = (event) => this.pointed(event);
    for (const name of ["pointermove", "pointerdown"]) this.plot.addEventListener(name, pointed);
    this.plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== this.crosshair.node) this.crosshair.hide();
    });
    // The arrow keys go on from where the pointer was pressed.
    this.plot.addEventListener("click", () => { if (this.crosshair.at !== null) this.crosshair.node.focus({ preventScroll: true }); });
  }

  pointed(event) {
    const x = this.scales?.x, at = event.clientX - this.plot.getBoundingClientRect().left;
    if (!x || at < x.start || at > x.start + x.length) return;
    this.crosshair.point(this, x.of(at), Math.abs(x.of(at + REACH_PX) - x.of(at)));
  }

  /** Show the crosshair and the values at a place of the x axis; null: hide them. Returns the values in words. */
  cross(value, reach = 0, marks = []) {
    const { x, y } = this.scales || {}, at = x && value !== null ? x.at(value) - x.start : NaN;
    this.line.hidden = !(at >= 0 && at <= x.length);
    if (this.line.hidden) {
      fill(this.values);
      return "";
    }
    this.line.style.transform = `translateX(${x.start + at}px)`;
    this.line.style.top = `${y.start + Math.min(0, y.length)}px`;
    this.line.style.height = `${Math.abs(y.length)}px`;
    this.line.classList.toggle("before", at > x.length / 2);
    const isSource = this.crosshair.source === this || (!this.crosshair.source && this.node === this.node.parentNode?.firstChild);
    fill(this.line, isSource && marks.map((each) => h("span", {}, each)));
    const found = this.lines.map((trace) => [trace, valueIn(trace, value, reach)]).filter(([, each]) => each !== null);
    const named = found.length > 1;
    this.values.classList.toggle("many", found.length > 3);
    fill(this.values, found.map(([trace, each]) => h("span", { style: { "--swatch": trace.line?.color } }, named && h("small", {}, `${plain(trace.name)} `), each)));
    return found.map(([trace, each]) => `${plain(trace.name)} ${each}`).join(", ");
  }

  /** Show the crosshair again after drawing. */
  crossed() {
    this.plot.dataset.drawn = "";
    const { at = null, places, span, marks } = this.crosshair || {};
    if (at !== null) this.cross(places[this.along]?.[at] ?? null, span, marks);
  }

  close() {
    this.closed = true;
    this.crosshair?.charts.delete(this);
    this.observer.disconnect();
    this.watcher.disconnect();
  }
}

/** A chart by Plotly: bars, heat maps, categories, and all else that is no line over numbers. */
export class Chart extends Frame {
  resized() {
    if (this.drawn && this.plot.isConnected) window.Plotly.Plots.resize(this.plot);
  }

  close() {
    super.close();
    if (this.drawn) window.Plotly.purge(this.plot);
  }

  /** Called when the chart has come into view, or left it. */
  seen(visible) {
    this.visible = visible;
    if (visible && this.waiting) this.draw(...this.waiting).catch((error) => { this.plot.textContent = error.message; });
  }

  /**
   * Draw traces; a chart out of view is drawn when it comes into view.
   * @param {object[]} traces - Plotly's.
   * @param {{x?: object, y?: object, shapes?: object[], layout?: object, label?: string}} options - `x` and `y` add to
   *   the axes.
   */
  async draw(traces, options = {}) {
    this.waiting = [traces, options];
    if (!this.visible) return;
    const script = await plotly();
    if (this.closed || this.waiting?.[0] !== traces) return;
    this.waiting = null;
    const { x = {}, y = {}, shapes = [], layout = {}, label = "" } = options;
    this.whole = { xaxis: x.whole, yaxis: y.whole };
    if (label) this.plot.setAttribute("aria-label", label);
    const colours = themeColours();
    const axis = { gridcolor: colours.grid, linecolor: colours.grid, zeroline: false, automargin: true, exponentformat: "e", separatethousands: true };
    const touch = matchMedia("(pointer: coarse)").matches;
    await script.react(this.plot, traces, {
      margin: { l: 52, r: 12, t: 6, b: 36 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { color: colours.text, size: 11, family: "system-ui, sans-serif" }, showlegend: false, hovermode: this.crosshair ? false : "x",
      hoverlabel: { bgcolor: colours.panel, bordercolor: colours.grid, font: { color: colours.text, size: 11 }, namelength: 28 },
      xaxis: { ...axis, ...scaled(traces, "x", x, this.plot.clientWidth / 90), fixedrange: touch },
      yaxis: { ...axis, ...scaled(traces, "y", y, this.plot.clientHeight / 36), fixedrange: touch },
      shapes, ...layout,
    }, { displaylogo: false, showSendToCloud: false, displayModeBar: touch ? false : "hover", doubleClick: "autosize", modeBarButtonsToRemove: ["select2d", "lasso2d", "pan2d", "zoom2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"] });
    if (!this.drawn) this.plot.on("plotly_relayout", (event) => this.relayout(event));
    this.drawn = true;
    this.measure();
    this.crossed();
  }

  /** Take Plotly's axes, for the crosshair. */
  measure() {
    const { xaxis, yaxis } = this.plot._fullLayout;
    const axis = ({ range, type, _offset, _length }) => scale(type === "log" ? range.map((end) => 10 ** end) : range.map(Number), type === "log", _offset, _length);
    this.scales = { x: axis(xaxis), y: axis(yaxis) };
  }

  /** Label the axes again after a zoom. */
  relayout(event) {
    this.measure();
    const changed = (axis) => [`${axis}.range[0]`, `${axis}.range`, `${axis}.autorange`].some((key) => key in event);
    const fresh = ["xaxis", "yaxis"].filter((name) => changed(name) && this.plot._fullLayout[name].tickmode === "array").flatMap((name) => {
      const { ends, log } = this.scales[name[0]];
      return Object.entries(ticks(ends, log, 6, this.whole[name])).map(([key, each]) => [`${name}.${key}`, each]);
    });
    if (fresh.length) window.Plotly.relayout(this.plot, Object.fromEntries(fresh));
  }
}

/** Return the index of the first of ascending values that is not less. */
export function lowerBound(values, least) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < least) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the value of a line at x as text; null if it has none there. Points of their own must be within reach. */
function valueIn({ type, mode = "", hoverinfo, x, y, meta }, x0, reach) {
  if (type !== "scatter" || hoverinfo === "skip" || !mode.includes("lines") || !x.length) return null;
  const after = Math.min(lowerBound(x, x0), x.length - 1), before = Math.max(0, after - 1);
  const at = Math.abs(x0 - x[before]) < Math.abs(x[after] - x0) ? before : after;
  const gap = mode.includes("markers") ? reach : Math.max(reach, x[after] - x[before]);
  if (y[at] === null || !Number.isFinite(y[at]) || Math.abs(x[at] - x0) > gap) return null;
  const { low, high, smoothed, words } = meta || {}, ends = low ? [text.number(low[at]), text.number(high[at])] : [];
  return [text.number(y[at]), smoothed && " smoothed", ends[0] !== ends[1] && ` (${ends[0]} to ${ends[1]})`, words && `, ${plain(words[at])}`].filter(Boolean).join("");
}

/** A name of Plotly as text. */
const plain = (name = "") => name.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

/** Return an axis' settings for Plotly: its range, and ticks that read as all numbers of the page do. */
function scaled(traces, letter, { title, range, whole = false, ...rest }, most) {
  const named = { ...rest, title: { text: title, standoff: 4 } }, log = rest.type === "log";
  const isOurs = traces.every((trace) => trace.type === "scatter") && ["log", "linear", undefined].includes(rest.type);
  const ends = range || (isOurs && !(letter === "y" && traces.some((trace) => trace.error_y)) && extent(traces, letter, log));
  if (!ends) return { ...named, autorange: true };
  const shown = log ? ends.map((end) => Math.log10(Math.max(end, Number.MIN_VALUE))) : ends;
  return { ...(isOurs && ticks(ends, log, most, whole)), ...named, range: shown, autorange: false };
}

/** Whether two values are equal, up to the rounding of single precision. */
export const isFlat = (low, high) => high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));

/**
 * Return the range of the lines' values with an edge; null if there are none. Equal values are in its middle.
 * @param {number[]} inside - a range of x, outside of which values don't count; null: all count.
 */
export function extent(traces, letter, log = false, inside = null) {
  let low = Infinity, high = -Infinity;
  for (const trace of traces) {
    const { x, [letter]: values = [] } = trace;
    for (let at = 0; at < values.length; at += 1) {
      const value = values[at];
      if (typeof value === "string") return null;
      if (value === null || !Number.isFinite(value) || trace.y?.[at] === null || (log && value <= 0) || (inside && (x[at] < inside[0] || x[at] > inside[1]))) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return null;
  if (isFlat(low, high)) {
    if (log) return [low / 2, 2 * low];
    return low === 0 ? [-1, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
  }
  const edge = letter === "y" ? 0.05 : traces.some((trace) => trace.mode !== "lines") ? 0.03 : 0;
  return log ? [low * (low / high) ** edge, high * (high / low) ** edge] : [low - edge * (high - low), high + edge * (high - low)];
}

/** Return about `most` round values of a range with their texts; `whole`: integers only. */
export function ticks(ends, log, most, whole = false) {
  const [low, high] = [Math.min(...ends), Math.max(...ends)], decades = Math.log10(high / low);
  let tickvals = [], step = 0;
  if (log && low > 0 && decades > 0.7) {
    const every = Math.ceil(decades / Math.max(2, most)), factors = decades > 2 ? [1] : [1, 2, 5];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) tickvals.push(...factors.map((factor) => factor * 10 ** power));
    tickvals = tickvals.filter((value) => value >= low && value <= high);
  } else {
    const rough = (high - low) / Math.max(2, Math.min(most, 12)), size = 10 ** Math.floor(Math.log10(rough));
    step = Math.max(whole ? 1 : 0, [1, 2, 5, 10].find((factor) => factor * size >= rough) * size);
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + 1e-9 * step; number += 1) tickvals.push(number * step);
  }
  return { tickmode: "array", tickvals, ticktext: text.ticks(tickvals, step) };
}

const known = new Map();

/** The page's colours for charts. */
export function themeColours() {
  const dark = isDark();
  if (!known.has(dark)) {
    const style = getComputedStyle(document.documentElement), read = (name) => style.getPropertyValue(name).trim();
    known.set(dark, { text: read("--text"), quiet: read("--quiet"), grid: read("--line"), panel: read("--panel") });
  }
  return known.get(dark);
}
