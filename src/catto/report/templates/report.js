"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child !== null && child !== undefined) made.append(child);
  return made;
};
const percent = (value, digits = 2) => (100 * value).toFixed(digits);
// Name of a number -> its title and definition, read from the section of definitions; `raw` numbers are not in per cent.
const DEFINITIONS = Object.fromEntries([...document.querySelectorAll("#definitions dl > div")].map(one =>
  [one.id.slice("def-".length), { title: one.children[0].textContent, text: one.children[1].textContent, raw: "raw" in one.dataset }]));

// Theme: the reader's choice overrides the system's, and is remembered if the browser allows it.
(() => {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("catto-theme"); } catch { return null; } };
  if (stored()) root.dataset.theme = stored();
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("catto-theme", root.dataset.theme); } catch { /* private mode */ }
  });
})();

// Filters: hide what belongs to an unchecked budget, task or method.
(() => {
  const box = document.querySelector(".filters");
  if (matchMedia("(max-width: 50rem)").matches) document.getElementById("filterbox").open = false;
  const active = kind => {
    const inputs = [...box.querySelectorAll(`[data-kind=${kind}] input`)];
    return inputs.length ? new Set(inputs.filter(one => one.checked).map(one => one.value)) : null;
  };
  function apply() {
    const [budgets, tasks, methods] = ["budget", "task", "method"].map(active);
    const shown = (set, value) => !set || !value || set.has(value);
    const any = (set, values) => !set || !values.length || values.some(one => set.has(one));
    for (const one of document.querySelectorAll("main tr[data-method]")) one.hidden = !shown(methods, one.dataset.method);
    for (const one of document.querySelectorAll("main [data-task]")) one.hidden = !shown(tasks, one.dataset.task);
    for (const one of document.querySelectorAll("main .block, main .budget")) one.hidden = !shown(budgets, one.dataset.budget);
    for (const one of document.querySelectorAll("main figure")) {
      one.hidden = !(shown(budgets, one.dataset.budget) && any(tasks, JSON.parse(one.dataset.tasks)) && any(methods, JSON.parse(one.dataset.methods)));
    }
  }
  box.addEventListener("change", apply);
  document.getElementById("all").addEventListener("click", () => {
    for (const one of box.querySelectorAll("input")) one.checked = true;
    apply();
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details.fold").forEach(one => { one.open = true; }));
})();

// The card of a number: its definition and everything known about it.
(() => {
  const dialog = document.getElementById("card"), body = document.getElementById("card-body");
  const scaled = (name, value) => (DEFINITIONS[name]?.raw ? value.toFixed(4) : percent(value));
  const line = (name, value, note) => {
    const definition = DEFINITIONS[name];
    return el("tr", {}, el("th", { scope: "row" }, definition?.title || name, el("small", {}, note || definition?.text || "")), el("td", {}, value));
  };
  const signed = (name, value) => (value > 0 ? "+" : "") + scaled(name, value);
  const pText = p => (p < 0.001 ? "< 0.001" : "= " + p.toFixed(3));
  function versusText(name, one) {
    const ends = one.low === null ? "" : ` [${signed(name, one.low)}, ${signed(name, one.high)}]`;
    const corrected = one.p_corrected === null ? "" : `, corrected ${pText(one.p_corrected)}`;
    return `${signed(name, one.difference)}${ends} (p ${pText(one.p_value)}${corrected})`;
  }
  // A metric is the name of a number of the group, or, for a rule that picks one of 8 answers, `8 majority vote`.
  function named(group, metric) {
    const [, k, rule] = metric.match(/^(\d+) ?(.*)$/) || [];
    if (k) return { name: rule || "most confident", spread: group.selection[k][rule || "most confident"], suffix: `, k = ${k}` };
    return { name: metric, spread: group.metrics[metric] || group.others[metric], suffix: "" };
  }
  function open(group, button) {
    const title = DATA.methods[group.method] + " on " + DATA.tasks[group.task];
    const source = group.trained_on === group.task ? "" : ", trained on " + DATA.tasks[group.trained_on];
    const budget = group.budget ? ", " + DATA.budgets[group.budget].toLowerCase() : "";
    const { name: main, spread, suffix } = named(group, button.dataset.metric), deviation = "std" in button.dataset;
    const definition = DEFINITIONS[main];
    const seedCount = `${group.seeds.length} seed${group.seeds.length > 1 ? "s" : ""}, N = ${group.n.toLocaleString("en")} questions each.`;
    const rows = Object.entries(group.metrics).map(([name, one]) => line(name, scaled(name, one.mean) + (one.std === null ? "" : " ± " + scaled(name, one.std))));
    for (const [name, one] of Object.entries(group.others)) rows.push(line(name, scaled(name, one.mean)));
    const special = [];
    const interval = deviation ? null : group.intervals[main];
    if (interval && interval.low !== null) special.push(line("interval", `[${scaled(main, interval.low)}, ${scaled(main, interval.high)}]`));
    if (interval && interval.reason) {
      special.push(line("interval", "none", interval.reason));
      special.push(line("debiased_ece", percent(group.metrics.debiased_ece.mean)));
      special.push(line("gap", `${signed("gap", group.gap.value)} [${signed("gap", group.gap.low)}, ${signed("gap", group.gap.high)}]`));
    }
    if (main === "ece" && !deviation) special.push(line("null", `${percent(group.null.low)} to ${percent(group.null.high)}`));
    if (group.versus[main] && !deviation) special.push(line("versus", versusText(main, group.versus[main])));
    const seeds = group.by_seed.filter(one => (one[main] ?? null) !== null).map(one => el("tr", {}, el("th", { scope: "row" }, "Seed " + one.seed), el("td", {}, scaled(main, one[main])),
      el("td", {}, group.versus_seed[one.seed]?.[main] ? versusText(main, group.versus_seed[one.seed][main]) + " to " + DATA.baseline : "")));
    body.replaceChildren(
      el("h3", { id: "card-title" }, `${definition.title}${suffix}: ${title}${source}${budget}`),
      group.forced ? el("p", { class: "forced" }, group.forced) : "",
      el("p", { class: "note" }, definition.text + (deviation ? ` ${DEFINITIONS.std.title}: ${DEFINITIONS.std.text}` : "")),
      el("div", { class: "big" }, button.textContent),
      el("p", { class: "note" }, deviation ? `Standard deviation over ${seedCount} Mean: ${percent(spread.mean)}.` : `Mean over ${seedCount}` + (spread.std === null ? "" : ` Standard deviation: ${scaled(main, spread.std)}.`)),
      special.length ? el("table", {}, el("tbody", {}, ...special)) : "",
      seeds.length > 1 ? el("details", {}, el("summary", {}, "Every seed"), el("table", {}, el("tbody", {}, ...seeds))) : "",
      el("details", {}, el("summary", {}, "All metrics of this group"), el("table", {}, el("tbody", {}, ...rows))));
    dialog.showModal();
  }
  document.querySelector("main").addEventListener("click", event => {
    const button = event.target.closest("button.num");
    if (button) open(DATA.groups[button.dataset.group], button);
  });
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
})();
