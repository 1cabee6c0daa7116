/** Charts of lines over numbers on a canvas. Plotly needs 20 ms to draw one, this a millisecond: a zoom is seen at once. */

import { extent, Frame, lowerBound, scale, themeColours, ticks } from "./charts.js";
import { h } from "./dom.js";

const DASHES = { dash: [7, 4], dot: [2, 3], dashdot: [7, 3, 2, 3] };
const FONT = "11px system-ui, sans-serif";
const TOP = 6, RIGHT = 12, BOTTOM = 36, LEAST_LEFT = 40;
/** Pixels of a drag that are a zoom and no click, and of one across the axis that mean both axes. */
const LEAST_DRAG = 6, BOTH_AXES = 24;
/** Pixels around a line in which the pointer is at it. */
const REACH = 12;
/** Opacity of the lines that don't stand out. */
const PALE = 0.15;

const known = (value) => value !== null && Number.isFinite(value);

export class LineChart extends Frame {
  /**
   * @param {string} title
   * @param {object} options - those of `Frame`.
   * @param {(zoom: {x?: number[]|null, y?: number[]|null}) => void} options.onZoom - both null after a double click; an
   *   axis that stays is left out.
   * @param {boolean} options.zoomsY - whether a drag chooses a range of y too.
   * @param {(name: string) => void} options.onPoint - called with the name of the line that is pointed at, or "".
   */
  constructor(title, { onZoom = null, zoomsY = false, onPoint = null, ...options } = {}) {
    super(title, { ...options, role: "img" });
    Object.assign(this, { onZoom, zoomsY, standing: "", size: null });
    this.canvas = h("canvas", {});
    this.selection = h("div", { class: "selection", hidden: true });
    this.plot.append(this.canvas);
    this.frame.append(this.selection);
    const save = h("button", { type: "button", class: "pin", title: "Save a picture", "aria-label": `Picture of ${title}`, onclick: () => this.save() }, "⤓");
    this.values.after(save);
    this.plot.addEventListener("pointerdown", (event) => this.drag(event));
    this.plot.addEventListener("dblclick", () => this.onZoom?.({ x: null, y: null }));
    if (onPoint) {
      this.plot.addEventListener("pointermove", (event) => onPoint(this.lineAt(event.offsetX, event.offsetY)));
      this.plot.addEventListener("pointerleave", () => onPoint(""));
    }
  }

  resized({ width, height }) {
    this.size = [width, height];
    this.soon();
  }

  seen(visible) {
    this.visible = visible;
    this.soon();
  }

  /**
   * Draw lines and markers, in the next frame in which the chart is in view.
   * @param {object[]} traces - as Plotly's of the type `scatter`, with ascending x.
   * @param {{x?: object, y?: object, shapes?: object[], label?: string}} options - axes have `title`, `type`, `range` and
   *   `whole`; a shape is a band (`from`, `to`, `color`, `label`) or a line at `x` or `y` (`color`, `dash`).
   */
  draw(traces, { x = {}, y = {}, shapes = [], label = "" } = {}) {
    Object.assign(this, { lines: traces, x, y, shapes, isDue: true });
    if (label) this.plot.setAttribute("aria-label", label);
    this.soon();
  }

  /** Let the lines with this name stand out; empty: all. */
  highlight(name) {
    this.standing = name;
    this.soon();
  }

  soon() {
    this.waits ||= requestAnimationFrame(() => {
      this.waits = 0;
      if (!this.closed && this.visible && this.size?.[0] && this.isDue) this.paint();
    });
  }

  paint() {
    const [width, height] = this.size, ratio = devicePixelRatio || 1, pen = this.canvas.getContext("2d");
    const pixels = [width, height].map((side) => Math.round(side * ratio));
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) [this.canvas.width, this.canvas.height] = pixels;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    this.axes(pen, width, height);
    pen.save();
    const { x, y } = this.scales;
    pen.beginPath();
    pen.rect(x.start, y.start + y.length, x.length, -y.length);
    pen.clip();
    for (const shape of this.shapes) this.shape(pen, shape);
    this.lines.forEach((trace, index) => {
      pen.globalAlpha = this.standing && trace.name !== this.standing ? PALE : 1;
      const shown = this.shown(trace.x);
      if (trace.fill) area(pen, this.lines[index - 1], trace, shown, this.scales);
      if (trace.mode.includes("lines") && trace.line.width) polyline(pen, trace, shown, this.scales);
    });
    pen.restore();
    for (const trace of this.lines) {
      pen.globalAlpha = this.standing && trace.name !== this.standing ? PALE : 1;
      if (trace.mode.includes("markers")) this.markers(pen, trace);
    }
    pen.globalAlpha = 1;
    this.crossed();
  }

  /** Set the scales, and draw the axes with their ticks and titles. */
  axes(pen, width, height) {
    const { lines, x, y } = this, colours = themeColours(), log = [x, y].map(({ type }) => type === "log");
    const xEnds = x.range || extent(lines, "x", log[0]) || (log[0] ? [1, 10] : [0, 1]);
    const yEnds = y.range || extent(lines, "y", log[1], xEnds) || extent(lines, "y", log[1]) || (log[1] ? [1, 10] : [0, 1]);
    const yTicks = ticks(yEnds, log[1], height / 36), widest = Math.max(...yTicks.ticktext.map((each) => pen.measureText(each).width));
    const left = Math.max(LEAST_LEFT, Math.ceil(widest) + 12), floor = height - BOTTOM;
    this.scales = { x: scale(xEnds, log[0], left, width - left - RIGHT), y: scale(yEnds, log[1], floor, TOP - floor) };
    const xTicks = ticks(xEnds, log[0], width / 90, x.whole);
    Object.assign(pen, { strokeStyle: colours.grid, fillStyle: colours.text, lineWidth: 1, textAlign: "center", textBaseline: "top" });
    pen.beginPath();
    xTicks.tickvals.forEach((value, index) => {
      const at = Math.round(this.scales.x.at(value)) + 0.5;
      pen.moveTo(at, TOP);
      pen.lineTo(at, floor);
      const half = pen.measureText(xTicks.ticktext[index]).width / 2;
      pen.fillText(xTicks.ticktext[index], Math.min(at, width - half), floor + 5);
    });
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    yTicks.tickvals.forEach((value, index) => {
      const at = Math.round(this.scales.y.at(value)) + 0.5;
      pen.moveTo(left, at);
      pen.lineTo(width - RIGHT, at);
      pen.fillText(yTicks.ticktext[index], left - 6, at);
    });
    pen.stroke();
    pen.textAlign = "center";
    if (x.title) pen.fillText(x.title, left + (width - left - RIGHT) / 2, height - 8);
  }

  /** The first and the last index of ascending values that a line through the shown range needs. */
  shown(xs) {
    const [low, high] = this.scales.x.ends;
    return [Math.max(0, lowerBound(xs, low) - 1), Math.min(xs.length, lowerBound(xs, high) + 1)];
  }

  shape(pen, { from, to, x, y, color, dash, label }) {
    const { x: across, y: up } = this.scales, top = up.start + up.length;
    pen.setLineDash(DASHES[dash] || []);
    Object.assign(pen, { strokeStyle: color, fillStyle: color, lineWidth: 1 });
    if (from !== undefined) {
      const left = Math.max(across.at(from), across.start), right = Math.min(across.at(to), across.start + across.length);
      pen.fillRect(left, top, right - left, -up.length);
      Object.assign(pen, { fillStyle: themeColours().quiet, textAlign: "left", textBaseline: "top" });
      if (label && pen.measureText(label).width + 8 <= right - left) pen.fillText(label, left + 4, top + 3);
    } else {
      pen.beginPath();
      if (y === undefined) for (const end of [top, up.start]) pen.lineTo(across.at(x), end);
      else for (const end of [across.start, across.start + across.length]) pen.lineTo(end, up.at(y));
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  /** Markers; one beyond the range is not drawn, or at its edge (`atEdge`), so that the tallest is seen. */
  markers(pen, { x: xs, y: ys, marker, line }) {
    const { x, y } = this.scales, [top, floor] = [y.start + y.length, y.start];
    xs.forEach((value, index) => {
      const at = x.at(value), wanted = y.at(ys[index]), up = Math.min(floor, Math.max(top, wanted));
      if (!known(ys[index]) || !(at >= x.start - 1 && at <= x.start + x.length + 1) || (up !== wanted && !marker.atEdge)) return;
      symbol(pen, at, up, { color: line?.color, ...marker });
    });
  }

  /** Return the name of the line nearest to a place in the plot; "" if none is near. */
  lineAt(px, py) {
    const { x, y } = this.scales || {}, value = x?.of(px);
    let best = REACH, found = "";
    for (const { x: xs, y: ys, name = "", mode, hoverinfo } of x ? this.lines : []) {
      const after = lowerBound(xs, value), near = [after - 1, after].filter((at) => known(ys[at] ?? null)).map((at) => Math.hypot(0.2 * (x.at(xs[at]) - px), y.at(ys[at]) - py));
      const away = Math.min(Infinity, ...near);
      if (mode.includes("lines") && hoverinfo !== "skip" && away < best) [best, found] = [away, name];
    }
    return found;
  }

  /** Select a range with the mouse. On a touch screen a drag scrolls, and shows the crosshair. */
  drag(event) {
    if (!this.onZoom || !this.scales || event.button !== 0 || event.pointerType !== "mouse") return;
    const { x, y } = this.scales, bounds = this.plot.getBoundingClientRect(), [low, high] = [y.start + y.length, y.start];
    const place = ({ clientX, clientY }) => [
      Math.min(x.start + x.length, Math.max(x.start, clientX - bounds.left)), Math.min(high, Math.max(low, clientY - bounds.top)),
    ];
    const from = place(event), listening = new AbortController();
    let box = null;
    const moved = (now) => {
      const to = place(now), wide = Math.abs(to[0] - from[0]), tall = Math.abs(to[1] - from[1]);
      const inX = wide >= LEAST_DRAG && !(this.zoomsY && wide < BOTH_AXES && tall > wide), inY = this.zoomsY && tall >= LEAST_DRAG && (!inX || tall > BOTH_AXES);
      box = (inX || inY) && { ...(inX && { x: [from[0], to[0]] }), ...(inY && { y: [from[1], to[1]] }) };
      this.selection.hidden = !box;
      const [left, right] = box?.x || [x.start, x.start + x.length], [one, other] = box?.y || [low, high];
      Object.assign(this.selection.style, { left: `${Math.min(left, right)}px`, width: `${Math.abs(right - left)}px`, top: `${Math.min(one, other)}px`, height: `${Math.abs(other - one)}px` });
    };
    const ended = (now) => {
      listening.abort();
      this.selection.hidden = true;
      if (!box || now.type === "pointercancel") return;
      const values = (axis, pixels) => pixels && pixels.map(axis.of).sort((a, b) => a - b);
      this.onZoom({ x: values(x, box.x), y: values(y, box.y) });
    };
    event.preventDefault();
    this.plot.setPointerCapture(event.pointerId);
    const { signal } = listening;
    this.plot.addEventListener("pointermove", moved, { signal });
    for (const name of ["pointerup", "pointercancel"]) this.plot.addEventListener(name, ended, { signal });
  }

  /** Have the browser save the chart as a picture. */
  save() {
    const { width, height } = this.canvas, picture = h("canvas", { width, height: height + 30 }), pen = picture.getContext("2d"), colours = themeColours();
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, width, height + 30);
    pen.drawImage(this.canvas, 0, 30);
    Object.assign(pen, { fillStyle: colours.text, font: "600 15px system-ui, sans-serif", textBaseline: "middle" });
    pen.fillText(this.title.textContent, 12, 15);
    h("a", { href: picture.toDataURL(), download: `${this.title.textContent}.png` }).click();
  }
}

function polyline(pen, { x: xs, y: ys, line }, [first, last], { x, y }) {
  Object.assign(pen, { strokeStyle: line.color, lineWidth: line.width, lineJoin: "round", lineCap: "round" });
  pen.setLineDash(DASHES[line.dash] || []);
  pen.beginPath();
  let isOpen = false;
  for (let at = first; at < last; at += 1) {
    if (!known(ys[at])) isOpen = false;
    else {
      const px = x.at(xs[at]), py = y.at(ys[at]);
      if (!isOpen) pen.moveTo(px, py);
      pen.lineTo(px, py); // a point without neighbours is a dot
      isOpen = true;
    }
  }
  pen.stroke();
  pen.setLineDash([]);
}

/** Fill the area between two lines with the same x. */
function area(pen, { y: lows }, { x: xs, y: highs, fillcolor }, [first, last], { x, y }) {
  pen.fillStyle = fillcolor;
  pen.beginPath();
  for (let at = first; at < last; at += 1) {
    if (!known(lows[at])) continue;
    const begin = at;
    while (at < last && known(lows[at])) at += 1;
    for (let index = begin; index < at; index += 1) pen.lineTo(x.at(xs[index]), y.at(highs[index]));
    for (let index = at - 1; index >= begin; index -= 1) pen.lineTo(x.at(xs[index]), y.at(lows[index]));
    pen.closePath();
    pen.fill();
    pen.beginPath();
  }
}

/** Draw one marker. */
function symbol(pen, x, y, { color, size, symbol: kind = "circle", line }) {
  const half = size / 2;
  pen.beginPath();
  if (kind === "circle") pen.arc(x, y, half, 0, 2 * Math.PI);
  else if (kind === "square") pen.rect(x - half, y - half, size, size);
  else {
    const corners = { diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]], "triangle-up": [[0, -1.2], [1.2, 0.9], [-1.2, 0.9]], "x-thin": [[-1, -1], [1, 1], [0, 0], [1, -1], [-1, 1], [0, 0]] }[kind];
    for (const [right, down] of corners) pen.lineTo(x + half * right, y + half * down);
    pen.closePath();
  }
  Object.assign(pen, { fillStyle: color, strokeStyle: line?.color || color, lineWidth: line?.width || 0 });
  if (kind !== "x-thin") pen.fill();
  if (line?.width) pen.stroke();
}
