/** The list of all runs. */

import { cell, chooseColumns, columns, leastWidth } from "./columns.js";
import { bdi, check, choice, fill, h, runLink } from "./dom.js";
import * as text from "./format.js";
import { filtered, groupOf, isArchived, items, settingsOf, STATUSES, tagsOf, varying, withoutGroup } from "./rows.js";
import { change, format, list } from "./state.js";
import { store } from "./store.js";
import { nameOfView, showViews } from "./views.js";
import { WindowedTable } from "./window.js";

/** Most runs that are compared at once. */
export const MOST_COMPARED = 20;
/** Value of the parameter `open` while all groups are unfolded. */
const ALL = "*";

export class RunsView {
  constructor(root, params) {
    this.root = root;
    this.params = params;
    this.build();
    this.draw();
  }

  build() {
    const set = (key) => (value) => this.change({ [key]: value });
    this.filter = h("input", {
      type: "search", id: "filter", placeholder: "Filter (/)", "aria-label": "Filter runs", value: this.params.q || "",
      autocomplete: "off", spellcheck: "false", oninput: () => set("q")(this.filter.value), onkeydown: (event) => this.leaveFilter(event),
    });
    this.status = choice("Status", [["", "all"], ...STATUSES.map((each) => [each, each])], this.params.status || "", set("status"));
    this.tag = h("span", {});
    this.group = h("span", {});
    this.sort = h("span", { class: "narrow-only" });
    this.simulated = check("simulated", this.params.sim === "1", (on) => set("sim")(on ? "1" : ""));
    this.archived = check("archived", this.params.arch === "1", (on) => set("arch")(on ? "1" : ""));
    this.unfold = h("button", { type: "button", onclick: () => set("open")(this.params.open === ALL ? "" : ALL) });
    const choose = (cols) => { this.change({ cols }); return this.columns; };
    this.views = h("button", { type: "button", "aria-haspopup": "dialog", onclick: () => showViews(this.params, () => this.draw()) });
    this.compare = h("a", { class: "button", id: "compare-selected" });
    this.clear = h("button", { type: "button", onclick: () => { set("sel")(""); this.filter.focus(); } }, "Clear selection");
    this.summary = h("p", { class: "summary", role: "status" });
    this.reset = h("button", { type: "button", onclick: () => { this.filter.value = ""; this.change({ q: "", status: "", tag: "" }); this.filter.focus(); } }, "Clear filter");
    this.head = h("tr", {});
    this.bodyNode = h("tbody", {});
    this.table = h("table", { class: "runs", "aria-label": "Runs" }, h("thead", {}, this.head), this.bodyNode);
    this.scroller = h("div", { class: "list", id: "list", onkeydown: (event) => this.key(event) }, this.table);
    this.window = new WindowedTable(this.scroller, this.bodyNode, (item) => this.describe(item));
    fill(this.root, h("h1", { class: "hidden" }, "Runs"),
      h("div", { class: "controls" }, this.filter, h("div", { class: "choices" }, this.status, this.tag, this.group, this.unfold, this.sort, this.simulated, this.archived,
        h("button", { type: "button", "aria-haspopup": "dialog", onclick: () => chooseColumns(this.columns, this.kept, choose) }, "Columns"),
        this.views, this.compare, this.clear)),
      this.summary, this.reset, this.scroller);
  }

  close() {
    this.window.close();
  }

  update(params) {
    this.params = params;
    if (document.activeElement !== this.filter) this.filter.value = params.q || "";
    this.status.querySelector("select").value = params.status || "";
    this.simulated.querySelector("input").checked = params.sim === "1";
    this.archived.querySelector("input").checked = params.arch === "1";
    this.draw();
  }

  /** Change the address, and show it. */
  change(changes) {
    this.params = change(changes);
    this.draw();
  }

  /** Called when rows have changed. */
  rows() {
    this.draw();
  }

  draw() {
    const all = [...store.rows.values()], { kept, simulated, archived } = filtered(all, this.params);
    this.kept = kept;
    this.sorting = this.params.sort || "-created";
    this.selected = new Set(list(this.params.sel).filter((id) => !store.complete || store.rows.has(id)));
    this.open = new Set(list(this.params.open));
    const settings = varying(kept);
    this.varying = kept.length > 1 ? new Set(settings.map(({ key }) => key)) : null;
    this.columns = columns(this.params.cols, kept, settings);
    this.columnKeys = new Set(this.columns.map(({ key }) => key));
    this.drawChoices(all);
    this.drawSummary({ shown: kept.length, simulated, archived, all: all.length });
    this.archived.hidden = !archived && this.params.arch !== "1" && !all.some(isArchived);
    this.window.set(items(kept, { sort: this.sorting, group: groupOf(this.params), open: (name) => this.isOpen(name) }));
    const groups = this.window.items.some((item) => item.group);
    this.unfold.hidden = !groups;
    this.unfold.textContent = this.params.open === ALL ? "Fold all" : "Unfold all";
    this.views.textContent = nameOfView(this.params) ? `View: ${nameOfView(this.params)}` : "Views";
    this.drawHead();
    this.table.setAttribute("aria-rowcount", this.window.items.length + 1);
  }

  /** Draw the choices whose options depend on the runs. */
  drawChoices(all) {
    const tags = tagsOf(all), keys = [...new Set(tags.map((tag) => tag.split("=")[0]))], group = groupOf(this.params);
    const { tag } = this.params, sorts = [{ key: "name", title: "Run" }, ...this.columns.filter((each) => !each.unsorted)];
    const groups = [["sweep", "sweep"], ["experiment", "experiment"], ["fork", "fork parent"], ...keys.map((key) => [`tag:${key}`, `tag ${key}`]), ["none", "none"]];
    const signature = JSON.stringify([tags, tag, group, sorts.map(({ key }) => key), this.sorting]);
    if (this.choicesOf === signature) return;
    this.choicesOf = signature;
    fill(this.tag, tags.length > 0 && choice("Tag", [["", "all"], ...tags.map((each) => [each, each])], tag || "", (value) => this.change({ tag: value })));
    fill(this.group, choice("Group", groups, group, (value) => {
      this.filter.value = withoutGroup(this.filter.value);
      this.change({ group: value === "sweep" ? "" : value, open: "", q: this.filter.value });
    }));
    const options = sorts.flatMap(({ key, title, says }) => [[key, `${says || title} ↑`], [`-${key}`, `${says || title} ↓`]]);
    fill(this.sort, choice("Sort", options, this.sorting, (sort) => this.change({ sort })));
  }

  /** Draw the titles of the columns. */
  drawHead() {
    const sort = this.sorting, signature = `${sort} ${[...this.columnKeys]}`;
    if (this.headOf === signature) return;
    this.headOf = signature;
    this.table.style.minWidth = `${leastWidth(this.columns)}px`;
    const name = { key: "name", title: "Run", class: "c-name", rises: true };
    fill(this.head, h("th", { class: "c-select" }, h("span", { class: "hidden" }, "Select")), [name, ...this.columns].map((column) => {
      const props = { class: column.class, scope: "col", title: column.says || null, style: column.width ? { width: `${column.width}px` } : {} };
      if (column.unsorted) return h("th", props, column.title);
      const own = sort.replace("-", "") === column.key, down = sort.startsWith("-");
      const next = own ? (down ? column.key : `-${column.key}`) : column.rises ? column.key : `-${column.key}`;
      return h("th", { ...props, "aria-sort": own ? (down ? "descending" : "ascending") : null },
        h("button", { type: "button", "data-focus": column.key, onclick: () => this.change({ sort: next }) },
          h("span", {}, column.title), own && h("span", { "aria-hidden": "true" }, down ? "\u00a0↓" : "\u00a0↑")));
    }));
  }

  drawSummary({ shown, simulated, archived, all }) {
    const parts = [store.loaded ? text.counted(shown, "run") : "Loading runs"];
    if (shown + simulated + archived < all) parts[0] += ` of ${text.whole(all)}`;
    if (simulated) parts.push(`${text.counted(simulated, "simulated run")} hidden`);
    if (archived) parts.push(`${text.counted(archived, "archived run")} hidden`);
    if (store.loaded && !store.complete) parts.push("still reading runs");
    if (store.loaded && store.complete && !all) parts.push("start one with `hlatctl train`");
    this.reset.hidden = shown > 0 || !store.complete || !(withoutGroup(this.params.q).trim() || this.params.status || this.params.tag);
    const amount = this.selected.size;
    if (amount > MOST_COMPARED) parts.push(`${text.whole(amount)} are selected; at most ${MOST_COMPARED} can be compared`);
    const says = `${parts.join(" · ")}.`;
    if (this.summary.textContent !== says) this.summary.textContent = says;
    const ready = amount > 0 && amount <= MOST_COMPARED;
    this.compare.textContent = amount ? `Compare ${text.counted(amount, "run")}` : "Compare";
    this.compare.setAttribute("aria-disabled", String(!ready));
    if (ready) this.compare.href = format({ view: "compare", params: { runs: [...this.selected].join(",") } });
    else this.compare.removeAttribute("href");
    this.clear.hidden = !amount;
  }

  describe(item) {
    const { row, group, rows, depth } = item, ids = group ? rows.map((each) => each.run_id) : [row.run_id];
    const chosen = ids.filter((id) => this.selected.has(id)).length, open = group && this.isOpen(group);
    return {
      key: group ? `group ${group}` : row.run_id,
      signature: JSON.stringify([row, depth, chosen, open, ids.length, [...this.columnKeys], group ? this.spread(rows) : this.settings(row)]),
      build: () => (group ? this.groupRow(item, open, chosen) : this.runRow(row, depth, chosen > 0)),
    };
  }

  /** Return the settings of a run that differ among the shown runs, and whether each has a column. */
  settings(row) {
    return [...settingsOf(row)].filter(([key]) => !this.varying || this.varying.has(key))
      .map(([key, value]) => ({ says: `${key}=${value}`, hasColumn: this.columnKeys.has(`set:${key}`) }));
  }

  /** Return what a group's row shows of its runs beside their sums. */
  spread(rows) {
    return [statuses(rows), this.columns.filter(({ says }) => says).map(({ hint }) => hint(null, rows))];
  }

  runRow(row, depth, chosen) {
    const box = h("input", {
      type: "checkbox", checked: chosen, "aria-label": `Select ${row.name || row.run_id}`, "data-focus": "select",
      onchange: () => this.select([row.run_id], box.checked),
    });
    const under = [row.name && h("small", {}, bdi(row.run_id)), ...marks({ ...row, simulated: row.simulated && !depth })].filter(Boolean);
    const name = h("div", { class: "run-name" }, runLink(row, { "data-focus": "open", title: row.run_id }), under.length > 0 && h("div", { class: "under" }, under));
    return h("tr", { class: `${chosen ? "chosen " : ""}depth-${depth}`, "data-run": row.run_id },
      h("td", { class: "c-select phone" }, box), h("td", { class: "c-name phone" }, name),
      this.columns.map((column) => cell(column, row, null, this.settings(row))));
  }

  groupRow({ group, rows, row }, open, chosen) {
    const ids = rows.map((each) => each.run_id), kind = groupOf(this.params), says = kind.startsWith("tag:") ? `${kind.slice(4)}=${group}` : group;
    const box = h("input", {
      type: "checkbox", checked: chosen === ids.length, "aria-label": `Select the runs of ${group}`, "data-focus": "select",
      onchange: () => this.select(ids, box.checked),
    });
    box.indeterminate = chosen > 0 && chosen < ids.length;
    const view = { sweep: "sweep", fork: "run" }[kind];
    const toggle = h("button", {
      type: "button", class: "fold", "aria-expanded": String(open), "aria-label": `${kind === "sweep" ? "Trials" : "Runs"} of ${group}`, "data-focus": view ? "fold" : "open",
      onclick: () => this.fold(group, !open),
    }, open ? "▾" : "▸");
    const link = view ? h("a", { href: format({ view, id: group }), "data-focus": "open" }, bdi(says)) : h("span", { class: "group-title" }, bdi(says));
    const counted = h("small", { class: "counted" }, text.counted(rows.length, kind === "sweep" ? "trial" : "run"));
    return h("tr", { class: "group", "data-run": group, "data-group": kind },
      h("td", { class: "c-select phone" }, box), h("td", { class: "c-name phone" }, h("div", { class: "group-name" }, toggle, h("div", { class: "run-name" }, link, h("div", { class: "under" }, counted, marks(row))))),
      this.columns.map((column) => (column.key === "about" ? h("td", { class: "c-differs phone" }, h("div", {}, statuses(rows))) : cell(column, row, rows, []))));
  }

  isOpen(group) {
    return this.params.open === ALL || this.open.has(encodeURIComponent(group));
  }

  fold(group, open) {
    if (this.params.open === ALL) this.open = new Set(this.window.items.filter((item) => item.group).map((item) => encodeURIComponent(item.group)));
    if (open) this.open.add(encodeURIComponent(group));
    else this.open.delete(encodeURIComponent(group));
    this.change({ open: [...this.open].join(",") });
  }

  select(ids, on) {
    for (const id of ids) {
      if (on) this.selected.add(id);
      else this.selected.delete(id);
    }
    this.change({ sel: [...this.selected].join(",") });
  }

  /** Go from the filter to the first run with the arrow down. */
  leaveFilter(event) {
    if (event.key !== "ArrowDown" || !this.window.items.length) return;
    event.preventDefault();
    this.focus(0);
  }

  /** Keys inside the list: arrows move between rows and fold groups, x selects. */
  key(event) {
    const row = event.target.closest("tr[data-index]");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const index = Number(row.dataset.index), item = this.window.items[index], last = this.window.items.length - 1;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.window.rowHeight) - 1);
    const next = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: last, PageDown: Math.min(last, index + page), PageUp: Math.max(0, index - page) }[event.key];
    const open = { ArrowRight: true, ArrowLeft: false }[event.key];
    const box = row.querySelector('input[type="checkbox"]');
    if (next !== undefined) this.focus(next);
    else if (open !== undefined && item?.group && this.isOpen(item.group) !== open) this.fold(item.group, open);
    else if (open === false && item?.depth) this.focus(this.window.items.findLastIndex((each, at) => at < index && each.group));
    else if (event.key === "x" && box) this.select(item.group ? item.rows.map((each) => each.run_id) : [item.row.run_id], !box.checked);
    else return;
    event.preventDefault();
  }

  /** Focus a run or a group, from which somebody has come back. */
  focusRun(id) {
    this.focus(this.window.items.findIndex(({ row, group }) => (group || row.run_id) === id));
  }

  /** Focus the link of an item. */
  focus(index) {
    if (index < 0 || index >= this.window.items.length) return;
    this.window.reveal(index);
    const row = this.bodyNode.querySelector(`tr[data-index="${index}"]`);
    if (row) row.querySelector('[data-focus="open"]').focus({ preventScroll: true });
  }
}

/** Return how many runs have each status: `2 running, 1 failed`. */
function statuses(rows) {
  const amounts = STATUSES.map((status) => [status, rows.filter((each) => each.status === status).length]);
  return amounts.filter(([, amount]) => amount).map(([status, amount]) => `${text.whole(amount)} ${status}`).join(", ");
}

function marks(row) {
  return [row.simulated && h("span", { class: "mark" }, "simulated"),
    row.needs_person && h("span", { class: "mark urgent", title: row.what || "It can't continue by itself." }, "needs a person")];
}
