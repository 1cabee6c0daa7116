/** The series that runs record: their titles, and lines for charts. The server describes them. */

import { faint } from "./charts.js";
import { smooth } from "./curves.js";

/** Title, unit and steepness by key, in the order of the charts, as answers of curves have described them. */
const known = new Map();

/** Take the descriptions of an answer. */
export function learn(metrics) {
  for (const [key, metric] of Object.entries(metrics)) known.set(key, metric);
}

export const titleOf = (key) => known.get(key)?.title || key;

/** Return the title of a metric with its unit. */
export function titled(key) {
  const unit = known.get(key)?.unit;
  return unit && unit.toLowerCase() !== titleOf(key).toLowerCase() ? `${titleOf(key)} (${unit})` : titleOf(key);
}

/** Whether the first steps of a series are far from the rest. */
export const isSteep = (key) => Boolean(known.get(key)?.steep);

/** Return keys in the order of the charts; unknown ones last. */
export function ordered(keys) {
  const order = [...known.keys()], place = (key) => (known.has(key) ? order.indexOf(key) : order.length);
  return [...new Set(keys)].sort((a, b) => place(a) - place(b));
}

/**
 * Return the traces of one series: its range as a band, its values, and their smoothed line.
 *
 * The validation loss has points of its own, one for each milestone.
 * @param {object} data - an answer of curves.
 * @param {{color: string, dash: string}} line
 * @param {{weight?: number, band?: boolean, name?: string}} options
 */
export function traces(data, key, line, { weight = 0, band = true, name = titleOf(key) } = {}) {
  const series = data.series[key];
  if (!series) return [];
  const base = { x: series.xs || data.xs, type: "scatter", name: escaped(name), mode: "lines" };
  if (series.xs) return [{ ...base, y: series.y, mode: "lines+markers", line: { ...line, width: 1.5 }, marker: { size: 7, symbol: "diamond" } }];
  const found = [];
  if (band && series.y.some((y, index) => y !== null && series.low[index] < series.high[index])) found.push(...edges(data.xs, series, line));
  if (weight > 0) found.push({ ...base, y: series.y, line: { color: faint(line.color, 0.25), width: 1 }, hoverinfo: "skip" });
  return [...found, { ...base, y: smooth(data.xs, series.y, weight), line: { ...line, width: 1.6 }, meta: { smoothed: weight > 0, ...(band && { low: series.low, high: series.high }) } }];
}

/** The least and the largest value of each point, with the area between them. */
function edges(xs, series, line) {
  const edge = { x: xs, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
  return [{ ...edge, y: series.low }, { ...edge, y: series.high, fill: "tonexty", fillcolor: faint(line.color, 0.18) }];
}

/** Plotly reads a few HTML tags in names. Show them as they are. */
export function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
