// The browser of predictions. The data stay in columns, `order` lists the numbers of the rows that match the filters,
// and only the visible ones of them are elements of the page.
(() => {
  const { cells, questions, columns } = DATA.browser;
  const [CELL, QUESTION, ANSWER, CONFIDENCE, FLAGS, RESPONSE] = columns;
  // Bits of FLAGS, as in browser.py.
  const RIGHT = 1, FALLBACK = 2, CUT = 4, PLAIN = 8;
  const HEIGHT = 64; // pixels of a row in the list
  const SPARE = 6; // rows drawn above and below the visible ones
  const form = document.getElementById("browser-filters"), list = document.getElementById("list");
  const runway = document.getElementById("runway"), detail = document.getElementById("detail"), count = document.getElementById("count");
  const total = CELL.length;
  let order = [], chosen = 0; // `chosen` is a position in `order`
  let frame = 0; // the request to paint that is pending
  let searchTexts = null; // the lower-case text of every row, made by the first search

  const taskKey = cell => cell.task + " " + cell.trained_on;
  const taskTitle = cell => DATA.tasks[cell.task] + (cell.task === cell.trained_on ? "" : ` (from ${DATA.tasks[cell.trained_on]})`);
  const budgetTitle = cell => (cell.budget ? DATA.budgets[cell.budget] : "");
  const methodTitle = cell => DATA.methods[cell.method] || cell.method;

  function fill(name, entries) {
    const menu = form.elements[name];
    for (const [value, title] of new Map(entries)) menu.append(el("option", { value }, title));
    menu.closest("label").hidden = menu.length < 3; // "all" and a single value leave nothing to choose
  }
  fill("task", cells.map(cell => [taskKey(cell), taskTitle(cell)]));
  const present = new Set(cells.map(cell => cell.method));
  fill("method", Object.entries(DATA.methods).filter(([name]) => present.has(name)));
  fill("budget", cells.filter(cell => cell.budget).map(cell => [cell.budget, budgetTitle(cell)]));
  fill("seed", cells.map(cell => [String(cell.seed), String(cell.seed)]).sort((a, b) => a[0] - b[0]));

  const compare = {
    wrong: (a, b) => (FLAGS[a] & RIGHT) - (FLAGS[b] & RIGHT) || CONFIDENCE[b] - CONFIDENCE[a],
    right: (a, b) => (FLAGS[b] & RIGHT) - (FLAGS[a] & RIGHT) || CONFIDENCE[a] - CONFIDENCE[b],
    high: (a, b) => CONFIDENCE[b] - CONFIDENCE[a],
    low: (a, b) => CONFIDENCE[a] - CONFIDENCE[b],
  };
  const sorted = {};
  // All rows are sorted once per order; filters then only walk through them.
  const inOrder = name => (sorted[name] ??= Uint32Array.from({ length: total }, (_, row) => row).sort((a, b) => compare[name](a, b) || a - b));

  function makeSearchTexts() {
    const questionTexts = questions.map(question => {
      const parts = (question.parts || []).map(part => part[1]);
      const options = (question.options || []).map(option => option[1]);
      return [question.id, ...parts, ...options].join("\n").toLowerCase();
    });
    return RESPONSE.map((text, row) => questionTexts[QUESTION[row]] + "\n" + text.toLowerCase());
  }

  const value = name => form.elements[name].value;

  function cellMatches(cell) {
    const sameTask = !value("task") || taskKey(cell) === value("task");
    const sameMethod = !value("method") || cell.method === value("method");
    const sameBudget = !value("budget") || cell.budget === null || cell.budget === value("budget");
    const sameSeed = !value("seed") || String(cell.seed) === value("seed");
    return sameTask && sameMethod && sameBudget && sameSeed;
  }

  // Option of the menu "Answer" -> whether a row with these flags belongs to it.
  const hasVerdict = {
    "": () => true,
    right: flags => flags & RIGHT,
    wrong: flags => !(flags & RIGHT),
    fallback: flags => flags & FALLBACK,
    plain: flags => flags & PLAIN,
  };

  function filtered() {
    const matches = cells.map(cellMatches);
    const verdictMatches = hasVerdict[value("verdict")];
    const low = Number(value("low") || 0) / 100;
    const high = value("high") === "" ? 1 : Number(value("high")) / 100;
    const text = value("text").trim().toLowerCase();
    if (text) searchTexts ??= makeSearchTexts();
    const kept = [];
    for (const row of inOrder(value("order"))) {
      const inRange = CONFIDENCE[row] >= low && CONFIDENCE[row] <= high;
      if (!matches[CELL[row]] || !inRange || !verdictMatches(FLAGS[row])) continue;
      if (text && !searchTexts[row].includes(text)) continue;
      kept.push(row);
    }
    return kept;
  }

  function apply() {
    order = filtered();
    chosen = 0;
    const wrong = order.reduce((sum, row) => sum + !(FLAGS[row] & RIGHT), 0);
    count.textContent = `${order.length.toLocaleString("en")} of ${total.toLocaleString("en")} predictions, ${wrong.toLocaleString("en")} wrong`;
    runway.style.height = order.length * HEIGHT + "px";
    list.scrollTop = 0;
    paint();
    show();
  }

  function summary(question) {
    return (question.parts || []).map(part => part[1]).join(" / ").replace(/\s+/g, " ") || question.id;
  }

  function rowElement(place) {
    const row = order[place], cell = cells[CELL[row]], right = FLAGS[row] & RIGHT;
    const made = el("div", { class: "row", role: "option", id: "row-" + place, "aria-selected": String(place === chosen), "aria-posinset": place + 1, "aria-setsize": order.length },
      el("b", { class: right ? "right" : "wrong" }, (100 * CONFIDENCE[row]).toFixed(0)),
      el("span", {}, el("span", { class: "line" }, summary(questions[QUESTION[row]]).slice(0, 160)),
        el("span", { class: "line sub" }, `${methodTitle(cell)} · ${ANSWER[row] ?? "no answer"}${right ? ", right" : ", gold " + questions[QUESTION[row]].gold}${FLAGS[row] & FALLBACK ? " · fallback" : FLAGS[row] & PLAIN ? " · plain" : ""}`)));
    made.style.top = place * HEIGHT + "px";
    made.dataset.place = place;
    return made;
  }

  function paint() {
    frame = 0;
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - SPARE);
    const last = Math.min(order.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + SPARE);
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(rowElement(place));
    runway.replaceChildren(...rows);
    if (order.length) list.setAttribute("aria-activedescendant", "row-" + chosen);
    else list.removeAttribute("aria-activedescendant");
  }

  function optionElement(option, row, question) {
    const [label, text] = option, gold = label === question.gold, given = label === ANSWER[row];
    const notes = [gold ? "gold" : "", given ? "answered" : "", question.posterior ? `posterior ${percent(question.posterior[label], 1)} %` : ""].filter(Boolean);
    return el("li", { class: `${gold ? "gold " : ""}${given ? "given " : ""}${given && !gold ? "bad-answer" : ""}` },
      el("b", {}, label), el("span", { class: "say" }, text === label ? "" : text), el("em", {}, notes.join(" · ")));
  }

  function show() {
    const row = order[chosen];
    if (row === undefined) { detail.replaceChildren(el("p", {}, "No predictions match these filters.")); return; }
    const cell = cells[CELL[row]], question = questions[QUESTION[row]], right = FLAGS[row] & RIGHT;
    const same = [];
    for (let other = 0; other < total; other += 1) {
      const otherCell = cells[CELL[other]];
      if (QUESTION[other] === QUESTION[row] && otherCell.trained_on === cell.trained_on && otherCell.seed === cell.seed) same.push(other);
    }
    detail.replaceChildren(
      el("div", {}, el("span", { class: "tag " + (right ? "right" : "wrong") }, right ? "right" : "wrong"), el("span", { class: "tag" }, `confidence ${(100 * CONFIDENCE[row]).toFixed(1)} %`),
        FLAGS[row] & FALLBACK ? el("span", { class: "tag" }, "fallback: no readable answer") : FLAGS[row] & PLAIN ? el("span", { class: "tag" }, "plain: no answer tags") : ""),
      el("h3", {}, [methodTitle(cell), taskTitle(cell), budgetTitle(cell), "seed " + cell.seed, question.id].filter(Boolean).join(" · ")),
      ...(question.parts || []).map(([name, text]) => el("p", { class: "part" }, question.parts.length > 1 ? el("b", {}, name) : "", text)),
      question.options ? el("ul", { class: "options" }, ...question.options.map(option => optionElement(option, row, question))) : el("p", {}, `Answered ${ANSWER[row] ?? "nothing"}, gold ${question.gold}.`),
      el("h3", {}, "Response"),
      el("div", { class: "response", tabindex: "0" }, RESPONSE[row] + (FLAGS[row] & CUT ? " … (cut here; the file has the full response)" : "")),
      same.length > 1 ? el("h3", {}, "The same question with the same seed") : "",
      same.length > 1 ? el("table", { class: "others" }, el("tbody", {}, ...same.map(other => {
        const its = cells[CELL[other]], ok = FLAGS[other] & RIGHT;
        return el("tr", {}, el("td", {}, methodTitle(its) + (its.budget ? ` (${its.budget})` : "")), el("td", {}, ANSWER[other] ?? "-"), el("td", {}, `${(100 * CONFIDENCE[other]).toFixed(1)} %`), el("td", { class: ok ? "good" : "bad" }, ok ? "right" : "wrong"));
      }))) : "");
    detail.scrollTop = 0;
  }

  function choose(place) {
    chosen = Math.max(0, Math.min(order.length - 1, place));
    const top = chosen * HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
    paint();
    show();
  }

  list.addEventListener("scroll", () => { frame ||= requestAnimationFrame(paint); }, { passive: true });
  list.addEventListener("click", event => {
    const row = event.target.closest(".row");
    if (!row) return;
    choose(Number(row.dataset.place));
    if (matchMedia("(max-width: 50rem)").matches) detail.scrollIntoView({ block: "start" });
  });
  list.addEventListener("keydown", event => {
    const page = Math.max(1, Math.floor(list.clientHeight / HEIGHT) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") { detail.focus(); event.preventDefault(); }
    if (step === undefined) return;
    event.preventDefault();
    choose(chosen + step);
  });
  let wait = 0;
  form.addEventListener("input", event => {
    clearTimeout(wait);
    wait = setTimeout(apply, event.target.name === "text" ? 120 : 0); // while someone types, wait for a pause
  });
  form.addEventListener("submit", event => event.preventDefault());
  new ResizeObserver(() => { frame ||= requestAnimationFrame(paint); }).observe(list);
  apply();
})();
