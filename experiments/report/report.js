"use strict";

// Tables: a click or a key on a column's title sorts the rows of each section by that column, dashes last.
function sortKey(cell) {
  const text = cell.textContent.trim();
  const found = text.replaceAll(",", "").match(/^[▲▼]?\s*(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(KiB|MiB|GiB)?/);
  if (!found) return text === "–" || text === "" ? null : text.toLowerCase();
  return Number(found[1]) * 1024 ** ["", "KiB", "MiB", "GiB"].indexOf(found[2] || "");
}

function sortTable(table, column, direction) {
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.classList.contains("section"));
    const keyed = rows.map((row, place) => ({row, place, key: sortKey(row.cells[column])}));
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.place - b.place;
      const order = typeof a.key === typeof b.key ? (a.key < b.key ? -1 : a.key > b.key ? 1 : 0)
        : typeof a.key === "number" ? -1 : 1;
      return direction * order || a.place - b.place;
    });
    for (const {row} of keyed) body.append(row);
  }
}

for (const table of document.querySelectorAll("main table")) {
  const titles = [...table.tHead.rows[0].cells];
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...title.childNodes);
    title.append(button);
    title.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const before = title.getAttribute("aria-sort");
      const rising = before === "none" ? column === 0 : before === "descending";
      titles.forEach((other) => other.setAttribute("aria-sort", "none"));
      title.setAttribute("aria-sort", rising ? "ascending" : "descending");
      sortTable(table, column, rising ? 1 : -1);
    });
  });
}

// Outputs: one category or all.
const choice = document.getElementById("category");
if (choice) {
  choice.parentElement.hidden = false;
  choice.addEventListener("change", () => {
    for (const request of document.querySelectorAll("details.request")) {
      request.hidden = choice.value !== "" && request.dataset.category !== choice.value;
    }
  });
}

// The trace: one step of one method at a time, its tree drawn from left to right.
const explorer = document.getElementById("explorer");
if (explorer) explore(explorer, JSON.parse(document.getElementById("trace-data").textContent));

function explore(section, requests) {
  const [BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y] = [116, 40, 34, 12];
  const part = (name) => document.getElementById("trace-" + name);
  let request, arm, at = 0;

  const shown = (piece) => piece === "" ? "∅" : piece.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·");
  const cut = (text) => [...text].length > 11 ? [...text].slice(0, 10).join("") + "…" : text;
  const probability = (p) => p === null ? "–" : p === 0 || p >= 0.001 ? p.toFixed(3) : p.toExponential(1);

  function element(parent, name, attributes, text) {
    const made = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  /** What became of a node, as a class of the drawing and in words. */
  function fate(step, node) {
    const {path, parents, end, emitted, depths} = step;
    if (node === 0) return ["root", "the pending token: emitted by the step before, verified with this tree"];
    if (path.includes(node)) {
      if (depths[node] > emitted.length) return ["cut", "accepted, but behind the end of the text: cut off"];
      return ["accepted", "accepted"];
    }
    if (!path.includes(parents[node])) return ["unreached", "not reached: a node before it was not accepted"];
    if (parents[node] !== end.node) return ["unreached", "not followed: a sibling was accepted"];
    const drawn = end.u === null ? "" : `, drawn with u = ${end.u}`;
    return ["rejected", `rejected: the new token is “${shown(end.piece)}”${drawn}`];
  }

  function reason(step) {
    const {end} = step;
    const draw = end.u === null ? "" : ` with u = ${end.u}`;
    const token = `“${shown(end.piece)}” (p ${probability(end.p)})`;
    if (end.reason === "stop") return "ended by a stop inside the accepted path";
    if (end.reason === "budget") return "ended by the token budget inside the accepted path";
    if (end.reason === "rejected") return `rejected${draw && ` by draw${draw}`}: the new token is ${token}`;
    return step.tokens.length === 1 ? `nothing was drafted: the token is ${token}`
      : `no child left to follow: the new token${draw} is ${token}`;
  }

  function describe(step, node) {
    if (node < 0) {
      const {piece, token, p} = step.end;
      return `new token “${shown(piece)}”, id ${token} · p ${probability(p)} · from the target`;
    }
    const facts = [`“${shown(step.pieces[node])}”, id ${step.tokens[node]}`, `depth ${step.depths[node]}`];
    if (node) {
      facts.push(`p ${probability(step.p[node])}`, `before temperature and filters ${probability(step.model_p[node])}`,
        step.sampled[node] ? `drawn from q ${probability(step.q[node])}` : "a point draft, not drawn");
    }
    if (step.stop) facts.push(`the path ends here with probability ${probability(step.stop[node])}`);
    return facts.concat(fate(step, node)[1]).join(" · ");
  }

  function draw(step) {
    const svg = part("tree");
    const held = svg.contains(document.activeElement);
    svg.replaceChildren();
    const children = step.tokens.map(() => []);
    for (let node = 1; node < step.tokens.length; node++) children[step.parents[node]].push(node);
    const cutOff = step.end.reason === "stop" || step.end.reason === "budget";
    if (!cutOff) children[step.end.node].push(-1);  // the new token
    const places = new Map();
    let row = 0;
    (function place(node, depth) {
      const below = node < 0 ? [] : children[node];
      const first = row;
      for (const child of below) place(child, depth + 1);
      places.set(node, {x: depth * (BOX_WIDTH + GAP_X) + 2, y: first * (BOX_HEIGHT + GAP_Y) + 2, depth});
      if (!below.length) row++;
    })(0, 0);
    const width = Math.max(...[...places.values()].map((p) => p.x)) + BOX_WIDTH + 2;
    const height = row * (BOX_HEIGHT + GAP_Y);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    const links = element(svg, "g", {"aria-hidden": "true"});
    for (const [node, {x, y}] of [...places].sort((a, b) => a[1].x - b[1].x || a[1].y - b[1].y)) {
      const kind = node < 0 ? "new" : fate(step, node)[0];
      if (node) {
        const from = places.get(node < 0 ? step.end.node : step.parents[node]);
        const [x1, y1, y2] = [from.x + BOX_WIDTH, from.y + BOX_HEIGHT / 2, y + BOX_HEIGHT / 2];
        const bend = `${x1 + GAP_X / 2} ${y1} ${x - GAP_X / 2} ${y2}`;
        element(links, "path", {class: kind, d: `M${x1} ${y1}C${bend} ${x} ${y2}`});
      }
      const text = describe(step, node);
      const group = element(svg, "g", {
        class: `node ${kind}`, transform: `translate(${x} ${y})`, tabindex: "0", role: "img", "aria-label": text});
      element(group, "title", {}, text);
      element(group, "rect", {width: BOX_WIDTH, height: BOX_HEIGHT, rx: 5});
      const mark = {accepted: "✓ ", rejected: "✗ ", cut: "✂ ", new: "+ "}[kind] || "";
      const piece = shown(node < 0 ? step.end.piece : step.pieces[node]);
      element(group, "text", {x: 7, y: 16, class: "piece"}, mark + cut(piece));
      const numbers = node === 0 ? "pending" : node < 0 ? `p ${probability(step.end.p)}`
        : `p ${probability(step.p[node])}` + (step.sampled[node] ? ` q ${probability(step.q[node])}` : "");
      element(group, "text", {x: 7, y: 32, class: "numbers"}, numbers);
      const show = () => { part("node").textContent = text; };
      group.addEventListener("focus", show);
      group.addEventListener("mouseenter", show);
    }
    if (held) svg.querySelector("g.node").focus();
  }

  function write(steps) {
    const box = part("text");
    box.replaceChildren();
    element(box, "span", {class: "soft"}, request.prompt);
    element(box, "span", {class: "soft break", "aria-hidden": "true"}, " ▸ ");
    steps.slice(0, at + 1).forEach((step, index) => {
      for (const token of step.emitted) {
        const kinds = [token.origin === "drafted" ? "d" : "", index === at ? "now" : ""].filter(Boolean).join(" ");
        element(box, "span", {class: kinds, title: `step ${index + 1}, ${token.origin}, id ${token.token}`},
          token.piece === "" ? "∅" : token.piece);
      }
    });
    box.scrollTop = box.scrollHeight;
  }

  function render() {
    const {steps} = request.methods[arm];
    const step = steps[at];
    part("step").max = steps.length - 1;
    part("step").value = at;
    part("step").setAttribute("aria-valuetext", `step ${at + 1} of ${steps.length}`);
    part("previous").disabled = at === 0;
    part("next").disabled = at === steps.length - 1;
    part("place").textContent = `step ${at + 1} of ${steps.length}`;
    const drafted = step.tokens.length - 1;
    const unverified = step.offered - drafted;
    part("summary").textContent = `${drafted} drafted, ${step.accepted} accepted, ${step.emitted.length} emitted, width `
      + `${step.width}; ${reason(step)}` + (unverified > 0 ? `; ${unverified} drafted nodes were not verified` : "")
      + (step.finish_reason ? `; the request ends: ${step.finish_reason}` : "");
    part("node").textContent = "Point at a node, or move to it with the Tab key, for its numbers.";
    draw(step);
    write(steps);
  }

  function go(place) {
    at = Math.min(Math.max(place, 0), request.methods[arm].steps.length - 1);
    render();
  }

  /** Changes the method and stays at the same place of the text. */
  function change(method) {
    let position = 0;
    for (const step of request.methods[arm].steps.slice(0, at)) position += step.emitted.length;
    arm = method;
    let end = 0;
    const place = request.methods[arm].steps.findIndex((step) => (end += step.emitted.length) > position);
    go(place < 0 ? request.methods[arm].steps.length - 1 : place);
  }

  function open(index) {
    const name = request ? request.methods[arm].name : null;
    request = requests[index];
    arm = Math.max(request.methods.findIndex((method) => name === null ? method.steps.some((s) => s.offered)
      : method.name === name), 0);
    const methods = part("methods");
    methods.querySelectorAll("label").forEach((label) => label.remove());
    request.methods.forEach((method, place) => {
      const label = element(methods, "label");
      const radio = element(label, "input", {type: "radio", name: "trace-method", value: place});
      radio.checked = place === arm;
      radio.addEventListener("change", () => change(place));
      label.append(" " + method.name);
    });
    go(0);
  }

  requests.forEach((one, index) => element(part("request"), "option", {value: index}, `${one.category}: ${one.id}`));
  part("request").addEventListener("change", (event) => open(Number(event.target.value)));
  part("step").addEventListener("input", (event) => go(Number(event.target.value)));
  part("previous").addEventListener("click", () => go(at - 1));
  part("next").addEventListener("click", () => go(at + 1));
  section.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: Infinity};
    if (!(event.key in moves) || ["INPUT", "SELECT"].includes(event.target.tagName) || event.altKey || event.ctrlKey
        || event.metaKey) return;
    event.preventDefault();
    go(moves[event.key]);
  });
  section.hidden = false;
  open(0);
}
