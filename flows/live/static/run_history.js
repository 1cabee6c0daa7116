/** What happened in a run: its stages over time, attempts, nodes, goodput, amendments, notes and warnings. */

import { bdi, chip, fill, h, nobr, table } from "./dom.js";
import * as text from "./format.js";

export class HistoryTab {
  constructor(root) {
    this.root = root;
  }

  close() {}

  /** Draw the parts whose content has changed: a selection, a scrolled table and the focus stay in the others. */
  show(details) {
    const { row, timeline: lanes, attempts: tries, goodput: times, nodes: places, amendments: changes, warnings: said } = details;
    const parts = [
      [timeline, { timeline: lanes, until: row.last_event_unix_s }], [attempts, tries], [goodput, times], [nodes, places],
      [amendments, changes], [notes, { notes: details.notes, tags: details.tags }], [warnings, said],
    ];
    if (!this.parts) fill(this.root, this.parts = parts.map(() => h("div", {})));
    parts.forEach(([draw, content], index) => {
      const part = this.parts[index], signature = JSON.stringify(content ?? null);
      if (part.signature === signature) return;
      part.signature = signature;
      fill(part, draw(content));
    });
  }
}

const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);

/** Stages, evaluations and attempts as bars over time, a bar for each time that one ran. */
function timeline({ timeline: lanes }) {
  const bars = lanes.flatMap((each) => each.bars);
  if (!bars.length) return section("Timeline", h("p", { class: "empty" }, "No stage has started."));
  const from = Math.min(...bars.map((each) => each.started_unix_s));
  const running = bars.some((each) => each.status === "running");
  const last = Math.max(...bars.map((each) => each.ended_unix_s || each.started_unix_s));
  const to = Math.max(running && last > Date.now() / 1000 - 7 * 86400 ? Date.now() / 1000 : last, from + 1);
  return section("Timeline", h("ol", { class: "timeline" }, lanes.map((each) => lane(each, from, to))),
    h("p", { class: "scale" }, h("span", {}, text.time(from)), h("span", {}, text.duration(to - from)), h("span", {}, text.time(to))));
}

function lane({ name, bars, count }, from, to) {
  const end = (each) => each.ended_unix_s || (each.status === "running" ? to : each.started_unix_s);
  const says = (each) => [each.of, each.status, end(each) > each.started_unix_s && text.duration(end(each) - each.started_unix_s), each.message].filter(Boolean).join(", ");
  const left = (each) => Math.min(100 * (each.started_unix_s - from) / (to - from), 99.6), width = (each) => 100 * (end(each) - each.started_unix_s) / (to - from);
  const newest = says(bars.at(-1)), total = bars.reduce((sum, each) => sum + end(each) - each.started_unix_s, 0);
  return h("li", {}, h("span", { class: "lane-name" }, bdi(name)),
    h("span", { class: "lane" }, bars.map((each) => h("span", { "data-status": each.status, title: `${name}: ${text.time(each.started_unix_s)}, ${says(each)}`, style: { left: `${left(each)}%`, width: `${Math.max(width(each), 0.3)}%` } }))),
    h("small", { title: newest }, bdi(count > 1 ? `${text.whole(count)} times, ${text.duration(total)}; newest: ${newest}` : newest)));
}

function attempts(tries) {
  if (!tries.length) return null;
  const rows = [...tries].reverse().map((each) => [
    text.whole(each.attempt), nobr(text.time(each.started_unix_s)),
    nobr(each.ended_unix_s ? text.duration(each.ended_unix_s - each.started_unix_s) : "running"),
    nobr(`${text.whole(each.from_step)} – ${text.whole(each.to_step)}`), h("span", {}, bdi(each.cause || "–"), each.evidence && h("small", { class: "block" }, bdi(each.evidence))),
    nobr(each.decision || "–"), text.count(each.lost_tokens), h("div", { class: "roomy" }, bdi(hosts(each.hosts))),
  ]);
  const slow = tries.filter((each) => each.recovery?.cause);
  const most = Math.max(...slow.map((each) => seconds(each.recovery)));
  return section("Attempts", slow.length > 0 && recoveries(slow, most), table("Attempts", ["#", "started", "lasted", "steps", "cause", "decision", "lost tokens", "hosts"], rows));
}

/** The parts of a recovery, in order, with the classes of their colours. */
const PHASES = ["detect", "decide", "retry", "place", "start", "groups", "load", "first_step"];
const part = (recovery, name) => recovery[`${name}_s`] || 0;
const seconds = (recovery) => PHASES.reduce((sum, name) => sum + part(recovery, name), 0);

/** Where training started from, unless that is storage. */
const IN_MEMORY = { memory: ", from memory", partner: ", from a partner's memory" };

/** From the end of an attempt to the first step of the next one, as bars of one scale: the newest of many. */
function recoveries(tries, most) {
  const bars = tries.slice(-40).reverse().map(({ attempt, recovery }) => {
    const said = PHASES.filter((name) => part(recovery, name) > 0).map((name) => `${name.replace("_", " ")} ${text.duration(part(recovery, name))}`).join(", ");
    let from = 0;
    return h("li", { title: said }, h("span", { class: "lane-name" }, bdi(`attempt ${text.whole(attempt)}`)),
      h("span", { class: "lane", role: "img", "aria-label": said }, PHASES.map((name) => {
        const left = 100 * from / most;
        from += part(recovery, name);
        return part(recovery, name) > 0 && h("span", { "data-phase": name, style: { left: `${left}%`, width: `${Math.max(100 * part(recovery, name) / most, 0.3)}%` } });
      })),
      h("small", {}, bdi(`${text.duration(seconds(recovery))} after ${recovery.cause}${recovery.warm ? ", warm" : ""}${IN_MEMORY[recovery.restored_from] ?? ""}`)));
  });
  return [h("h3", {}, "Recoveries"), h("ol", { class: "timeline" }, bars),
    h("p", { class: "scale phases" }, PHASES.map((name) => h("span", { "data-phase": name }, name.replace("_", " "))))];
}

function hosts(names) {
  return names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ") || "–";
}

function nodes(found) {
  if (!found.length) return null;
  return section("Nodes", table("Nodes", ["host", "state", "reason"], found.map((node) => [bdi(node.host), chip(node.state), bdi(node.reason || "–")])));
}

/** The wall time by category, and what follows from it. */
function goodput(found) {
  if (!found) return null;
  const parts = Object.entries(found.seconds).filter(([, seconds]) => seconds > 0);
  return section("Goodput",
    h("p", { class: "summary" }, `The bars are shares of the whole ${text.duration(found.wall_s)} of the run, with preparation, evaluation and waiting. Goodput and uptime count from the start of the first attempt to the end of training.`),
    h("ul", { class: "shares" }, parts.map(([name, seconds]) => h("li", {}, h("span", {}, bdi(name.replaceAll("_", " "))),
      h("span", { class: "lane" }, h("span", { "data-share": name, style: { left: "0", width: `${Math.max(100 * seconds / found.wall_s, 0.3)}%` } })),
      h("small", {}, `${text.percent(seconds / found.wall_s)} · ${text.duration(seconds)}`)))),
    table("Goodput", ["measure", "value"], found.facts));
}

function amendments(found) {
  if (!found.length) return null;
  const rows = found.map((each) => [nobr(text.time(each.unix_s)), each.begins,
    each.changes.map(({ key, before, after }) => h("div", {}, h("code", {}, bdi(key)), " ", bdi(text.setting(before)), " → ", bdi(text.setting(after)))), bdi(each.note || "")]);
  return section("Amendments", table("Amendments", ["when", "step", "change", "note"], rows));
}

function notes({ notes: found, tags }) {
  const marked = Object.entries(tags || {}).map(([key, value]) => h("span", { class: "tag" }, bdi(value ? `${key}=${value}` : key)));
  if (!found.length && !marked.length) return null;
  return section("Notes and tags", marked.length > 0 && h("p", {}, marked),
    h("ul", { class: "plain" }, found.map((note) => h("li", {}, h("small", {}, `${text.time(note.unix_s)} `), bdi(note.text)))));
}

function warnings(found) {
  if (!found.length) return null;
  return section("Warnings", h("ul", { class: "plain" }, [...found].reverse().map((each) => h("li", {},
    each.unix_s && h("small", {}, `${text.time(each.unix_s)} `), bdi(each.text)))));
}
