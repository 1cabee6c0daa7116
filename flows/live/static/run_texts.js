/** Texts of a run: samples that the model generated, logs, the documents of a step, and its settings. */

import { get, runPath } from "./api.js";
import { bdi, choice, fill, h, keyName, table } from "./dom.js";
import * as text from "./format.js";

export class SamplesTab {
  constructor(root) {
    this.root = root;
  }

  close() {}

  show({ samples }) {
    const signature = JSON.stringify(samples);
    if (this.signature === signature) return;
    this.signature = signature;
    if (!samples.length) return fill(this.root, h("p", { class: "empty" }, "This run has no samples. Set eval.prompts before training, and each milestone continues these prompts."));
    const byPrompt = Map.groupBy ? Map.groupBy(samples, (each) => each.prompt) : grouped(samples);
    fill(this.root, [...byPrompt].map(([prompt, found]) => h("section", { class: "samples" }, h("h2", {}, bdi(prompt)),
      [...found].reverse().map((each) => h("article", {}, h("small", {}, `${text.count(each.tokens)} tokens, step ${text.whole(each.step)}`), sample(each.text))))));
  }
}

/** A generated text; one without a visible character is described. */
function sample(generated) {
  const blank = !generated.trim() && h("p", { class: "empty" }, generated ? `${text.counted(generated.length, "character")}, all of them white space` : "no text: the model ended at once");
  return blank || h("pre", { class: "sample", tabindex: "0" }, bdi(generated.replace(/\n{3,}/g, (run) => `\n\n[${run.length - 2} more empty lines]\n`)));
}

function grouped(samples) {
  const found = new Map();
  for (const each of samples) found.set(each.prompt, [...(found.get(each.prompt) || []), each]);
  return found;
}

export class LogsTab {
  constructor(root, id, params, change) {
    Object.assign(this, { root, id, params, setParams: change });
    this.attempt = h("span", {});
    this.file = h("span", {});
    this.rank = h("input", { type: "number", min: 0, value: params.rank || "", placeholder: "all", "aria-label": "Rank", onchange: () => this.choose({ rank: this.rank.value }) });
    this.lines = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log" });
    this.message = h("p", { class: "empty", role: "status" }, "Loading.");
    fill(root, h("div", { class: "controls" }, this.attempt, this.file, h("label", { class: "field" }, h("span", {}, "Rank"), this.rank),
      h("button", { type: "button", onclick: () => this.load() }, "Read again")), this.message, this.lines);
    this.load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }

  show(details) {
    const numbers = details.attempts.map((each) => String(each.attempt)).reverse(), signature = String(numbers);
    if (this.signature === signature) return;
    this.signature = signature;
    fill(this.attempt, choice("Attempt", [["", "all"], ...numbers.map((each) => [each, each])], this.params.attempt || "", (attempt) => this.choose({ attempt, file: "" })));
  }

  /** Called when the run's journal has grown. */
  grow() {
    this.timer ||= setTimeout(() => { this.timer = 0; this.load(); }, 2000);
  }

  choose(changes) {
    this.params = { ...this.params, ...changes };
    this.setParams(changes);
    this.load();
  }

  async load() {
    const { attempt, rank, file } = this.params;
    try {
      const found = await get(runPath(this.id, "/logs"), { attempt, rank, file, lines: 300 });
      if (this.closed) return;
      this.drawFiles(found);
      const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40 || !this.lines.textContent;
      this.message.textContent = found.files.length ? `The last ${text.counted(found.lines.length, "line")} of ${found.file}.` : "This run has no logs.";
      this.lines.textContent = found.lines.join("\n");
      this.lines.hidden = !found.files.length;
      if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
    } catch (error) {
      this.message.textContent = `${error.message} ${error.hint || ""}`;
    }
  }

  drawFiles({ files, file }) {
    const options = files.map((each) => [each.name, `${each.name} (${text.bytes(each.bytes)})`]), signature = JSON.stringify([options, file]);
    if (this.files === signature) return;
    this.files = signature;
    fill(this.file, files.length > 0 && choice("File", options, file || "", (name) => this.choose({ file: name })));
  }
}

export class DocumentsTab {
  constructor(root, id, params, change) {
    Object.assign(this, { root, id, params, setParams: change });
    this.step = h("input", { type: "number", min: 1, value: params.step || "", "aria-label": "Step" });
    const form = h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); this.setParams({ step: this.step.value }); this.load(); } },
      h("label", { class: "field" }, h("span", {}, "Step"), this.step), h("button", {}, "Show documents"));
    this.found = h("div", {});
    fill(root, form, this.found);
  }

  close() {}

  show(details) {
    if (!this.step.value && details.row.step) this.step.value = details.row.step;
    if (!this.loaded && this.params.step) this.load();
    this.loaded = true;
  }

  async load() {
    fill(this.found, h("p", { class: "empty" }, "Reading documents."));
    try {
      const { step, documents } = await get(runPath(this.id, "/documents"), { step: this.step.value });
      fill(this.found, h("p", { class: "summary" }, `${text.counted(documents.length, "document")} in step ${text.whole(step)}.`),
        documents.map((each) => h("article", { class: "document" }, h("small", {}, bdi([each.source, each.id].filter(Boolean).join(" ")), each.tokens ? ` · ${text.counted(each.tokens, "token")}` : ""), h("pre", {}, bdi(each.text ?? "")))));
    } catch (error) {
      fill(this.found, h("p", { class: "problem" }, error.message), h("p", {}, error.hint));
    }
  }
}

export class SettingsTab {
  constructor(root) {
    this.root = root;
    this.filter = h("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", oninput: () => this.draw() });
    this.found = h("div", {});
    fill(root, h("div", { class: "controls" }, this.filter), this.found);
  }

  close() {}

  show({ config, changed, amendments, row }) {
    const signature = JSON.stringify([config, amendments]);
    if (this.signature === signature) return;
    const amended = amendments.flatMap((each) => each.changes.map(({ key }) => key)), command = row.overrides.map((each) => each.split("=")[0].replace(/^[+~]+/, ""));
    const before = new Map(amendments.flatMap((each) => each.changes.map((change) => [change.key, change.before])).reverse());
    Object.assign(this, { signature, config, before, sources: [["Amended", new Set(amended)], ["Changed on the command line", new Set(command)], ["Other than the default", new Set(changed)]] });
    this.draw();
  }

  draw() {
    const query = this.filter.value.toLowerCase();
    const kept = Object.entries(this.config).filter(([key, value]) => `${key} ${text.setting(value)}`.toLowerCase().includes(query));
    const source = (name) => this.sources.find(([, names]) => names.has(name))?.[0];
    const rows = (found) => found.map(([name, value]) => [h(source(name) ? "strong" : "span", {}, keyName(name)),
      h("span", {}, bdi(text.setting(value)), this.before.has(name) && h("small", {}, ` was ${text.setting(this.before.get(name))}`))]);
    if (query) return fill(this.found, table("Settings", ["setting", "value"], rows(kept)));
    const listed = (title, found, open) => found.length > 0 && h("details", { open }, h("summary", {}, `${title} (${text.whole(found.length)})`), table(title, ["setting", "value"], rows(found)));
    const topics = [...new Set(kept.map(([name]) => topicOf(name)))];
    fill(this.found, this.sources.map(([title]) => listed(title, kept.filter(([name]) => source(name) === title), true)),
      topics.map((topic) => listed(topic, kept.filter(([name]) => topicOf(name) === topic), false)));
  }
}

/** The first part of a key; those without a dot belong to the run. */
const topicOf = (key) => (key.includes(".") ? key.split(".")[0] : "run");
