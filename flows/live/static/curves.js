/** Curves of one run: loaded once, extended while the run grows, and finer ones for a zoomed range. */

import { get, runPath } from "./api.js";
import { isFlat, lowerBound } from "./charts.js";
import * as text from "./format.js";
import { learn } from "./metrics.js";

/** Points of a chart; the server averages more steps than these. */
export const POINTS = 1500;
const PARTS = ["y", "low", "high"];

export class Curves {
  /**
   * @param {string} id - of the run.
   * @param {string} x - step, tokens, time or flops. Times are hours since the first step.
   * @param {string[]} keys - series; empty: all that the run has.
   * @param {number|null} every - steps of each point, so that runs have the same points; null: as many as a chart shows.
   */
  constructor(id, x, keys, every = null) {
    Object.assign(this, { id, x, keys, every, whole: null, detail: null, asked: "", busy: false, origin: null });
  }

  /** What a chart draws: the zoomed range, or the whole run. */
  get data() {
    return this.detail || this.whole;
  }

  async read(more = {}) {
    const data = await get(runPath(this.id, "/curves"), { keys: this.keys.join(","), points: POINTS, x: this.x, every: this.every, ...more });
    learn(data.metrics);
    return this.inHours(data);
  }

  /** Return an answer with hours since the first step in the place of Unix seconds. */
  inHours(data) {
    if (this.x !== "time") return data;
    this.origin ??= data.xs[0] ?? null;
    const hours = (unix_s) => (unix_s === null ? null : (unix_s - this.origin) / 3600);
    const sparse = data.series.validation_loss;
    if (sparse) sparse.xs = sparse.xs.map(hours);
    for (const each of data.milestones) each.x = hours(each.x);
    return { ...data, xs: data.xs.map(hours), skipped: data.skipped.map(hours), spikes: data.spikes.map(hours) };
  }

  /** Read the whole run. */
  async load() {
    this.whole = await this.read();
    return this.data;
  }

  /** Read finer curves of a range of x, with so many steps for each point; null: show the whole run again. */
  async zoom(range, every = null) {
    this.asked = String(range);
    if (!range || !this.whole || this.whole.steps.length < 2) {
      this.detail = null;
      return;
    }
    const asked = this.asked, { steps, xs } = this.whole;
    const from = steps[Math.max(0, lowerBound(xs, Math.min(...range)) - 2)] + 1;
    const to = steps[Math.min(steps.length - 1, lowerBound(xs, Math.max(...range)) + 1)];
    const detail = await this.read({ from, to, every });
    if (this.asked === asked) this.detail = detail;
  }

  /**
   * Read what came after the last known step.
   * @param {number|null} changedFrom - the first step that is new. If it is one of ours, the run has returned to a
   *   checkpoint, and everything is read again.
   */
  async extend(changedFrom = null) {
    if (this.busy || !this.whole) return;
    this.busy = true;
    try {
      const { steps } = this.whole, last = steps.length ? steps[steps.length - 1] : 0;
      const restarted = changedFrom !== null && changedFrom <= last;
      if (restarted || steps.length < 2 || (!this.every && steps.length > 2 * POINTS)) await this.load();
      else this.append(await this.read({ from: last + 1 }));
    } finally {
      this.busy = false;
    }
  }

  append(more) {
    const { whole } = this, before = whole.steps.length;
    whole.steps.push(...more.steps);
    whole.xs.push(...more.xs);
    whole.tokens.push(...more.tokens);
    whole.times.push(...more.times);
    whole.skipped.push(...more.skipped);
    Object.assign(whole, { milestones: more.milestones, spikes: more.spikes, available: more.available });
    for (const [key, series] of Object.entries(more.series)) {
      if (series.xs) whole.series[key] = series;
      else appendSeries(whole.series[key] ??= { y: gaps(before), low: gaps(before), high: gaps(before) }, series);
    }
  }
}

function appendSeries(own, more) {
  for (const part of PARTS) own[part].push(...more[part]);
}

const gaps = (length) => Array(length).fill(null);

/** Return a point of an answer in words: its steps, tokens, time, and time since the first step. */
export function placed(data, index) {
  const before = index ? data.steps[index - 1] + 1 : data.steps[index], step = data.steps[index];
  return [
    before < step ? `steps ${text.whole(before)} to ${text.whole(step)}` : `step ${text.whole(step)}`, `${text.count(data.tokens[index])} tokens`,
    text.time(data.times[index]), `${text.duration(data.times[index] - data.began_unix_s)} after the first step`,
  ];
}

/** Parts of the range of x after which a smoothed value has forgotten all but the weight of a former one. */
const SMOOTHED_PARTS = 200;

/**
 * Return an exponential moving average over x, without the bias of its start.
 *
 * The weight belongs to a part of the range of x and not to a point, so that runs of different lengths are
 * smoothed alike.
 * @param {number} weight - from 0 (as it is) to below 1.
 */
export function smooth(xs, ys, weight) {
  if (!(weight > 0) || xs.length < 3) return ys;
  const scale = SMOOTHED_PARTS / (xs[xs.length - 1] - xs[0] || 1);
  let mean = 0, total = 0, before = xs[0];
  return ys.map((y, index) => {
    if (y === null) return null;
    const kept = Math.min(weight, 0.999) ** Math.max(scale * (xs[index] - before), 0.001);
    before = xs[index];
    mean = kept * mean + (1 - kept) * y;
    total = kept * total + (1 - kept);
    return mean / total;
  });
}

/**
 * Return the range of values after the first twentieth of the points; null if there are few or if they are equal.
 *
 * A loss falls so far in the first steps that the rest would look flat. Later spikes stay visible.
 * @param {Array<Array<number|null>>} series
 */
export function withoutStart(series) {
  const late = series.filter((ys) => ys.length >= 100).flatMap((ys) => ys.slice(Math.ceil(ys.length / 20))).filter((y) => y !== null);
  if (!late.length || series.some((ys) => ys.length < 100)) return null;
  const [least, most] = late.reduce(([low, high], y) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]);
  if (isFlat(least, most)) return null;
  const edge = 0.05 * (most - least);
  return [least > 0 ? Math.max(least - edge, least / 2) : least - edge, most + edge];
}

/** Return the value of a series at the point nearest to x that has one; null if there is none. */
export function valueAt(xs, ys, x) {
  const at = lowerBound(xs, x);
  for (let away = 0; away <= xs.length; away += 1) {
    for (const index of [at + away, at - away]) if (index >= 0 && index < xs.length && ys[index] !== null) return ys[index];
  }
  return null;
}

/**
 * Return the values of a curve minus those of another one, which is interpolated; null outside of its range.
 * @param {{xs: number[], ys: (number|null)[]}} other - with ascending xs.
 */
export function minus(xs, ys, other) {
  const known = other.xs.map((x, index) => [x, other.ys[index]]).filter(([, y]) => y !== null), places = known.map(([x]) => x);
  return xs.map((x, index) => {
    const after = lowerBound(places, x);
    if (ys[index] === null || after === places.length || (after === 0 && places[0] !== x)) return null;
    const [x1, y1] = known[after], [x0, y0] = known[Math.max(0, after - 1)];
    return ys[index] - (x1 === x0 ? y1 : y0 + (y1 - y0) * (x - x0) / (x1 - x0));
  });
}
