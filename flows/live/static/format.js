/** Quantities as text. Unknown values (null) are shown as a dash. */

const NONE = "–";
const COUNTS = [[1e24, "Y"], [1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** `1.84T`, `833K`. */
export function count(value) {
  if (!known(value)) return NONE;
  const unit = COUNTS.find(([size]) => Math.abs(value) >= size);
  return unit ? `${short(value / unit[0])}${unit[1]}` : String(Math.round(value));
}

/** A whole number with separators. */
export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : NONE;
}

/** From here on numbers have a unit of counts, and below the least one a power of ten. */
const LARGE = 1e4, LEAST = 1e-3;

/** A number with a few digits: `2.491`, `16.4K`, `1.23e-5`. */
export function number(value, digits = 4) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= LARGE) return count(value);
  return size < LEAST ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

/**
 * Return the texts of an axis' ticks: all in one unit, with the digits that tell them apart.
 * @param {number[]} values
 * @param {number} step - between two ticks; 0: a logarithmic axis, whose ticks have the same few digits.
 */
export function ticks(values, step) {
  const sizes = values.map(Math.abs).filter((size) => size > 1e-9 * step), largest = Math.max(...sizes), least = Math.min(...sizes);
  if (!sizes.length) return values.map(() => "0");
  if (!step) return values.map((value) => (least < LEAST ? value.toExponential().replace("+", "") : largest < LARGE ? String(Number(value.toPrecision(6))) : count(value)));
  const places = (unit) => Math.min(12, Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  const power = Math.floor(Math.log10(largest) + 1e-9);
  const [unit, ending] = largest < LEAST ? [10 ** power, `e${power}`] : (largest >= LARGE && COUNTS.find(([size]) => largest >= size)) || [1, ""];
  return values.map((value) => {
    if (Math.abs(value) <= 1e-9 * step) return "0";
    if (unit > 1 && places(unit) > 3) return value.toLocaleString("en", { maximumFractionDigits: places(1) });
    return `${Number((value / unit).toFixed(places(unit)))}${ending}`;
  });
}

/** A share from 0 to 1 as a percentage. */
export function percent(value) {
  return known(value) ? `${String(Number((100 * value).toFixed(1)))} %` : NONE;
}

/** US dollars. */
export function cost(value) {
  if (!known(value)) return NONE;
  return value < 100 ? `$${value.toFixed(2)}` : `$${count(value)}`;
}

/** `4.2 s`, `3 min 20 s`, `5 h 10 min`, `2 d 3 h`. */
export function duration(value) {
  if (!known(value)) return NONE;
  if (value < 59.5) return value < 9.95 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
  const all = Math.round(value), minutes = Math.floor(all / 60), hours = Math.floor(minutes / 60);
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${all % 60} s`;
}

/** A time in this browser's zone: `2026-11-21 10:15:00`. */
export function time(unix_s) {
  if (!known(unix_s)) return NONE;
  const at = new Date(1000 * unix_s), two = (part) => String(part).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** A time to the minute: `2026-11-21 10:15`. */
export function shortTime(unix_s) {
  return time(unix_s).slice(0, 16);
}

/** `3 runs`. */
export function counted(amount, thing) {
  return `${whole(amount)} ${thing}${amount === 1 ? "" : "s"}`;
}

/** Bytes in binary units. */
export function bytes(value) {
  const unit = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => value >= size);
  return unit ? `${short(value / unit[0])} ${unit[1]}` : `${value} bytes`;
}

/** A score with its standard error, to two digits of the error: `0.512 ± 0.011`. */
export function score(value) {
  if (!value || !known(value.value)) return NONE;
  if (!known(value.stderr)) return number(value.value);
  const decimals = value.stderr > 0 ? Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(value.stderr)))) : 4;
  return `${Number(value.value.toFixed(decimals))} ± ${number(value.stderr, 2)}`;
}

/** A value of the configuration. */
export function setting(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function short(value) {
  return String(Number(value.toFixed(Math.abs(value) < 10 ? 2 : 1)));
}
