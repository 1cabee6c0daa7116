/** The list of all runs. */

import { bar, bdi, check, chip, choice, fill, h, runLink } from "./dom.js";
import * as text from "./format.js";
import { filtered, items, scoresOf, share, STATUSES, tagsOf } from "./rows.js";
import { change, format, list } from "./state.js";
import { store } from "./store.js";
import { WindowedTable } from "./window.js";

/** Most runs that are compared at once. */
export const MOST_COMPARED = 20;
/** Key of the sort, title, and class of each column. */
const COLUMNS = [
  ["name", "Run", "c-name"], ["status", "Status", "c-status"], ["progress", "Progress", "c-progress"],
  ["loss", "Loss", "c-number"], ["validation_loss", "Val. loss", "c-number"], ["score", "Scores", "c-scores"],
  ["tokens_per_s", "Tok/s", "c-number"], ["mfu", "MFU", "c-number"], ["left_s", "Left", "c-left"],
  ["cost_usd", "Cost", "c-number"], [null, "Tags, note, settings", "c-differs"], ["created", "Created", "c-created"],
];

/** Columns that are hidden while no row has a value, by the key of their sort. */
const OPTIONAL = ["validation_loss", "score", "tokens_per_s", "mfu", "left_s", "cost_usd"];
const hasValue = (row, key) => (key === "score" ? scoresOf(row).length > 0 : row[key] !== null && row[key] !== undefined);

export class RunsView {
  constructor(root, params) {
    this.root = root;
    this.params = params;
    this.build();
    this.draw();
  }

  build() {
    const set = (key) => (value) => { this.params = change({ [key]: value }); this.draw(); };
    this.filter = h("input", {
      type: "search", id: "filter", placeholder: "Filter (/)", "aria-label": "Filter runs", value: this.params.q || "",
      autocomplete: "off", spellcheck: "false", oninput: () => set("q")(this.filter.value),
    });
    this.status = choice("Status", [["", "all"], ...STATUSES.map((each) => [each, each])], this.params.status || "", set("status"));
    this.tag = h("span", {});
    this.simulated = check("simulated", this.params.sim === "1", (on) => set("sim")(on ? "1" : ""));
    this.sort = choice("Sort", COLUMNS.filter(([key]) => key).flatMap(([key, title]) => [[key, `${title} ↑`], [`-${key}`, `${title} ↓`]]),
      this.params.sort || "-created", set("sort"));
    this.sort.classList.add("narrow-only");
    this.compare = h("a", { class: "button", id: "compare-selected" });
    this.clear = h("button", { type: "button", onclick: () => set("sel")("") }, "Clear selection");
    this.summary = h("p", { class: "summary", role: "status" });
    this.head = h("tr", {});
    this.bodyNode = h("tbody", {});
    this.scroller = h("div", { class: "list", id: "list", onkeydown: (event) => this.key(event) },
      h("table", { class: "runs", "aria-label": "Runs" }, h("thead", {}, this.head), this.bodyNode));
    this.window = new WindowedTable(this.scroller, this.bodyNode, (item) => this.describe(item));
    fill(this.root, h("h1", { class: "hidden" }, "Runs"),
      h("div", { class: "controls" }, this.filter, this.status, this.tag, this.sort, this.simulated, this.compare, this.clear),
      this.summary, this.scroller);
  }

  close() {
    this.window.close();
  }

  update(params) {
    this.params = params;
    if (document.activeElement !== this.filter) this.filter.value = params.q || "";
    this.status.querySelector("select").value = params.status || "";
    this.simulated.querySelector("input").checked = params.sim === "1";
    this.draw();
  }

  /** Called when rows have changed. */
  rows() {
    this.draw();
  }

  draw() {
    const all = [...store.rows.values()];
    const { kept, hidden } = filtered(all, this.params);
    this.selected = new Set(list(this.params.sel));
    this.open = new Set(list(this.params.open));
    this.drawTags(tagsOf(all));
    this.drawSummary(kept.length, hidden, all.length);
    this.window.set(items(kept, this.params.sort || "-created", this.open));
    this.drawHead(kept);
    this.scroller.querySelector("table").setAttribute("aria-rowcount", this.window.items.length + 1);
  }

  drawTags(tags) {
    const signature = `${tags.join("\n")}\n${this.params.tag || ""}`;
    if (this.tagSignature === signature) return;
    this.tagSignature = signature;
    const set = (value) => { this.params = change({ tag: value }); this.draw(); };
    fill(this.tag, tags.length > 0 && choice("Tag", [["", "all"], ...tags.map((tag) => [tag, tag])], this.params.tag || "", set));
  }

  /** Draw the titles of the columns; one in which no row has a value is hidden, so that names have its room. */
  drawHead(kept) {
    for (const name of OPTIONAL) this.scroller.classList.toggle(`without-${name}`, !kept.some((row) => hasValue(row, name)));
    const sort = this.params.sort || "-created";
    if (this.headSort === sort) return;
    this.headSort = sort;
    this.sort.querySelector("select").value = sort;
    fill(this.head, h("th", { class: "c-select" }, h("span", { class: "hidden" }, "Select")), COLUMNS.map(([key, title, name]) => {
      if (!key) return h("th", { class: name, scope: "col" }, title);
      const classes = OPTIONAL.includes(key) ? `${name} o-${key}` : name;
      const own = sort.replace("-", "") === key;
      const next = own ? (sort.startsWith("-") ? key : `-${key}`) : ["name", "status", "loss", "validation_loss", "left_s"].includes(key) ? key : `-${key}`;
      const order = own ? (sort.startsWith("-") ? "descending" : "ascending") : null;
      return h("th", { class: classes, scope: "col", "aria-sort": order },
        h("button", { type: "button", "data-sort": key, onclick: () => { this.params = change({ sort: next }); this.draw(); this.head.querySelector(`[data-sort="${key}"]`).focus(); } },
          title, own && h("span", { "aria-hidden": "true" }, sort.startsWith("-") ? " ↓" : " ↑")));
    }));
  }

  drawSummary(shown, hidden, all) {
    const parts = [store.loaded ? text.counted(shown, "run") : "Loading runs"];
    if (shown + hidden < all) parts[0] += ` of ${text.whole(all)}`;
    if (hidden) parts.push(`${text.counted(hidden, "simulated run")} hidden`);
    if (store.loaded && !store.complete) parts.push("still reading runs");
    if (store.loaded && store.complete && !all) parts.push("start one with `hlatctl train`");
    const amount = this.selected.size;
    if (amount > MOST_COMPARED) parts.push(`at most ${MOST_COMPARED} runs can be compared`);
    this.summary.textContent = `${parts.join(" · ")}.`;
    const ready = amount > 0 && amount <= MOST_COMPARED;
    this.compare.textContent = amount ? `Compare ${text.counted(amount, "run")}` : "Compare";
    this.compare.setAttribute("aria-disabled", String(!ready));
    if (ready) this.compare.href = format({ view: "compare", params: { runs: [...this.selected].join(",") } });
    else this.compare.removeAttribute("href");
    this.clear.hidden = !amount;
  }

  describe(item) {
    const { row, sweep, depth, differs } = item;
    const chosen = !sweep && this.selected.has(row.run_id), open = sweep && this.open.has(sweep);
    return {
      key: sweep ? `sweep ${sweep}` : row.run_id,
      signature: JSON.stringify([row, depth, chosen, open, differs, sweep && item.rows.length]),
      build: () => (sweep ? this.sweepRow(item, open) : this.runRow(differs === undefined ? row : { ...row, differs }, depth, chosen)),
    };
  }

  runRow(row, depth, chosen) {
    const box = h("input", {
      type: "checkbox", checked: chosen, "aria-label": `Select ${row.name || row.run_id}`, "data-focus": "select",
      onchange: () => this.select(row.run_id, box.checked),
    });
    const named = row.name && h("small", {}, bdi(row.run_id));
    const name = h("span", { class: "run-name" }, runLink(row, { "data-focus": "open", title: row.run_id }), named);
    return h("tr", { class: `${chosen ? "chosen " : ""}depth-${depth}`, "data-run": row.run_id },
      h("td", { class: "c-select" }, box), h("td", { class: "c-name" }, name, marks({ ...row, simulated: row.simulated && !depth })), cells(row), about(row),
      h("td", { class: "c-created", title: text.time(row.created_unix_s) }, text.shortTime(row.created_unix_s)));
  }

  sweepRow({ sweep, rows, row }, open) {
    const toggle = [
      h("button", { type: "button", class: "fold", "aria-expanded": String(open), "aria-label": `Trials of ${sweep}`, onclick: () => this.fold(sweep, !open) }, open ? "▾" : "▸"),
      h("a", { href: format({ view: "sweep", id: sweep }), "data-focus": "open", class: "run-name" }, bdi(sweep)),
    ];
    const amounts = STATUSES.map((status) => [status, rows.filter((each) => each.status === status).length]);
    const trials = amounts.filter(([, amount]) => amount).map(([status, amount]) => `${amount} ${status}`).join(", ");
    return h("tr", { class: "sweep", "data-run": sweep },
      h("td", { class: "c-select" }), h("td", { class: "c-name" }, toggle, marks(row)), cells(row),
      h("td", { class: "c-differs" }, `sweep of ${text.counted(rows.length, "trial")}: ${trials}`),
      h("td", { class: "c-created", title: text.time(row.created_unix_s) }, text.shortTime(row.created_unix_s)));
  }

  fold(sweep, open) {
    if (open) this.open.add(sweep);
    else this.open.delete(sweep);
    this.params = change({ open: [...this.open].join(",") });
    this.draw();
  }

  select(id, on) {
    if (on) this.selected.add(id);
    else this.selected.delete(id);
    this.params = change({ sel: [...this.selected].join(",") });
    this.draw();
  }

  /** Keys inside the list: arrows move between rows, x selects. */
  key(event) {
    const row = event.target.closest("tr[data-index]");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const box = row.querySelector('input[type="checkbox"]');
    if (step) {
      event.preventDefault();
      this.focus(Number(row.dataset.index) + step);
    } else if (event.key === "x" && box) {
      event.preventDefault();
      this.select(row.dataset.run, !box.checked);
    }
  }

  /** Focus the link of an item. */
  focus(index) {
    if (index < 0 || index >= this.window.items.length) return;
    this.window.reveal(index);
    const row = this.bodyNode.querySelector(`tr[data-index="${index}"]`);
    if (row) row.querySelector('[data-focus="open"]').focus({ preventScroll: true });
  }
}

function marks(row) {
  return [row.simulated && h("span", { class: "mark" }, "simulated"),
    row.needs_person && h("span", { class: "mark urgent", title: row.what || "It can't continue by itself." }, "needs a person")];
}

function cells(row) {
  const done = share(row), steps = row.total_steps ? `${text.whole(row.step)} of ${text.whole(row.total_steps)} steps` : `${text.whole(row.step)} steps`;
  const scores = scoresOf(row);
  const named = (label, value, name, key) => h("td", { class: key ? `${name} o-${key}` : name, "data-label": label }, value);
  return [
    h("td", { class: "c-status", title: row.what || row.problem || "" }, chip(row.status)),
    h("td", { class: "c-progress" }, bar(done, steps), h("small", {}, `${done === null ? "" : `${text.percent(done)} · `}${text.count(row.tokens)} tok`)),
    named("loss", text.number(row.loss), "c-number"), named("valid.", text.number(row.validation_loss), "c-number", "validation_loss"),
    h("td", { class: "c-scores o-score", title: scores.map(([name, value]) => `${name} ${text.number(value)}`).join("\n") },
      scores.slice(0, 2).map(([name, value]) => h("span", {}, h("small", {}, bdi(name)), h("span", {}, text.number(value, 3))))),
    named("tok/s", row.tokens_per_s === null ? "–" : text.count(row.tokens_per_s), "c-number", "tokens_per_s"), named("MFU", text.percent(row.mfu), "c-number", "mfu"),
    named("left", text.duration(row.left_s), "c-left", "left_s"), named("cost", text.cost(row.cost_usd), "c-number", "cost_usd"),
  ];
}

function about(row) {
  const tags = Object.entries(row.tags || {}).map(([key, value]) => h("span", { class: "tag" }, bdi(value ? `${key}=${value}` : key)));
  const problem = row.problem || (row.needs_person ? row.what : null);
  const whole = [row.differs, row.note, problem].filter(Boolean).join("\n");
  return h("td", { class: "c-differs", title: whole }, h("div", {}, problem && h("span", { class: "problem" }, bdi(problem), " "),
    tags, row.note && h("em", {}, bdi(row.note)), bdi(row.differs || "")));
}
