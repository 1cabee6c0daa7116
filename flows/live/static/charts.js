/** Charts by Plotly, in the page's colours. The script is loaded when the first chart is drawn. */

import { h } from "./dom.js";

/** Okabe and Ito's colours, which colour-blind people can tell apart; from the ninth run on, with other dashes. */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6bb3", "#8a8f98"];
const DARK_COLOURS = ["#4aa3df", "#f08a4b", "#2fc795", "#e39cc4", "#f0b83a", "#8fd0f5", "#ab9ae0", "#a8adb5"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

export const isDark = () => getComputedStyle(document.documentElement).colorScheme.includes("dark")
  && (document.documentElement.dataset.theme === "dark" || matchMedia("(prefers-color-scheme: dark)").matches && document.documentElement.dataset.theme !== "light");

/** Return the colour and dash of the line with this number. */
export function stroke(index) {
  const colours = isDark() ? DARK_COLOURS : COLOURS;
  return { color: colours[index % colours.length], dash: DASHES[Math.floor(index / colours.length) % DASHES.length] };
}

/** Return a colour with an opacity. */
export function faint(colour, opacity) {
  return `${colour}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;
}

let loading = null;

function plotly() {
  loading ??= new Promise((resolve, reject) => {
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
  return { title: AXES[axis], exponentformat: { time: "none", flops: "power" }[axis] || "B", ...more };
}

export class Chart {
  /**
   * @param {string} title
   * @param {(zoom: {x: number[]|null, y: number[]|null}) => void} onZoom - both null after a double click.
   */
  constructor(title, { onZoom = null, tall = false } = {}) {
    this.onZoom = onZoom;
    this.title = h("h2", {}, title);
    this.plot = h("div", { class: tall ? "plot tall" : "plot", role: "group", "aria-label": title });
    this.node = h("section", { class: "chart" }, this.title, this.plot);
    this.observer = new ResizeObserver(() => this.drawn && this.plot.isConnected && window.Plotly.Plots.resize(this.plot));
    this.observer.observe(this.plot);
    this.watcher = new IntersectionObserver((entries) => this.seen(entries.at(-1).isIntersecting), { rootMargin: "200px" });
    this.watcher.observe(this.plot);
  }

  close() {
    this.closed = true;
    this.observer.disconnect();
    this.watcher.disconnect();
    if (this.drawn) window.Plotly.purge(this.plot);
  }

  /** Called when the chart has come into view, or left it. */
  seen(visible) {
    this.visible = visible;
    if (visible && this.waiting) this.draw(...this.waiting).catch((error) => { this.plot.textContent = error.message; });
  }

  /**
   * Draw lines; a chart out of view is drawn when it comes into view.
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
    if (label) this.plot.setAttribute("aria-label", label);
    const colours = themeColours();
    const axis = { gridcolor: colours.grid, linecolor: colours.grid, zeroline: false, automargin: true, exponentformat: "e", separatethousands: true };
    const touch = matchMedia("(pointer: coarse)").matches;
    await script.react(this.plot, traces, {
      margin: { l: 52, r: 12, t: 6, b: 36 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { color: colours.text, size: 11, family: "system-ui, sans-serif" }, showlegend: false, hovermode: "x",
      hoverlabel: { bgcolor: colours.panel, bordercolor: colours.grid, font: { color: colours.text, size: 11 }, namelength: 28 },
      xaxis: { ...axis, ...ends(x), title: { text: x.title, standoff: 4 }, fixedrange: touch },
      yaxis: { ...axis, ...ends(y), title: { text: y.title, standoff: 4 }, fixedrange: touch },
      shapes, ...layout,
    }, { displaylogo: false, displayModeBar: "hover", doubleClick: "autosize", modeBarButtonsToRemove: ["select2d", "lasso2d", "pan2d", "autoScale2d"] });
    if (!this.drawn) this.plot.on("plotly_relayout", (event) => this.relayout(event));
    this.drawn = true;
  }

  relayout(event) {
    if (!this.onZoom) return;
    if (event["xaxis.autorange"] || event["yaxis.autorange"]) this.onZoom({ x: null, y: null });
    else if (["xaxis.range[0]", "xaxis.range", "yaxis.range[0]", "yaxis.range"].some((key) => key in event)) {
      const layout = this.plot._fullLayout;
      this.onZoom({ x: "xaxis.range[0]" in event || "xaxis.range" in event ? values(layout.xaxis) : undefined,
        y: "yaxis.range[0]" in event || "yaxis.range" in event ? values(layout.yaxis) : undefined });
    }
  }
}

/** Return an axis' range in its own values, also of a logarithmic one. */
function values(axis) {
  return axis.type === "log" ? axis.range.map((end) => 10 ** end) : axis.range.map(Number);
}

/** Return an axis' settings, with its range as Plotly wants it. */
function ends({ title, range, ...rest }) {
  if (!range) return { ...rest, autorange: true };
  const shown = rest.type === "log" ? range.map((end) => Math.log10(Math.max(end, Number.MIN_VALUE))) : range;
  return { ...rest, range: shown, autorange: false };
}

function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return { text: read("--text"), grid: read("--line"), panel: read("--panel") };
}
