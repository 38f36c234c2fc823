"use strict";
(() => {
  const F = JSON.parse(document.getElementById("summary").textContent);
  const root = document.documentElement, tip = document.getElementById("tip");
  const $ = (id) => document.getElementById(id);
  const COLOURS = ["blue", "orange", "green", "pink", "gold", "sky"].map((c) => `var(--${c})`);

  // Elements and numbers -------------------------------------------------------------
  function el(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "circle", "rect", "text", "title"].includes(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    for (const child of children) made.append(child);
    return made;
  }
  const digits = (v, n = 4) => {
    if (v === null || v === undefined) return "–";
    if (v !== 0 && (Math.abs(v) >= 1e6 || Math.abs(v) < 1e-4)) return v.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(v.toPrecision(n)));
  };
  const percent = (v) => `${(100 * v).toFixed(1)} %`;
  const moment = (days) => new Date(Math.round(days * 1440) * 6e4).toISOString();
  // Dates that have a time of day are shown with it.
  const date = (days) => (Math.abs(days - Math.round(days)) < 1 / 2880 ? moment(days).slice(0, 10) : moment(days).slice(0, 16).replace("T", " "));
  const isDate = (name) => F.columns.some((c) => c.name === name && c.kind === "date");
  const value = (name, v) => (isDate(name) ? date(v) : digits(v));
  const cut = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

  function showTip(text, event) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, event.clientY - box.height - 12)}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  function card(parent, title, note) {
    const made = el("div", { class: "card" }, el("h3", {}, title));
    if (note) made.append(el("p", { class: "note" }, note));
    parent.append(made);
    return made;
  }
  function cards(parent) {
    const made = el("div", { class: "cards" });
    parent.append(made);
    return made;
  }
  // Code stands between backticks.
  const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

  function table(parent, head, rows, numeric = []) {
    const cell = (tag, value, i) => el(tag, numeric.includes(i) ? { class: "n" } : {}, ...[value].flat());
    const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((v, i) => cell("td", v, i)))));
    const top = el("thead", {}, el("tr", {}, ...head.map((v, i) => cell("th", v, i))));
    parent.append(el("div", { class: "scroll" }, el("table", {}, top, body)));
  }

  // Charts -------------------------------------------------------------------
  const W = 390, H = 245;
  const CHARACTER = 6;  // average width of a character of an axis label

  // Days since 1970 at whole hours, days, months or years, at most `most` of them, with short labels.
  function dateTicks(low, high, most) {
    const span = high - low;
    const hours = [1, 2, 3, 6, 12].map((h) => h / 24), days = [1, 2, 4, 7, 14];
    const step = [...hours, ...days].find((s) => span / s <= most);
    if (step) {
      const first = Math.ceil(low / step - 1e-9) * step, values = [];
      for (let v = first; v <= high + 1e-9; v += step) values.push(v);
      const label = step < 1 ? (v) => (values.length && Math.abs(v - Math.round(v)) < 1e-6 ? moment(v).slice(5, 10) : moment(v).slice(11, 16)) : (v) => moment(v).slice(5, 10);
      return values.map((v, i) => [v, i === 0 ? (step < 1 ? moment(v).slice(5, 16).replace("T", " ") : moment(v).slice(0, 10)) : label(v)]);
    }
    const months = [1, 2, 3, 6, 12, 24, 60, 120, 240, 600, 1200].find((m) => span / (30.4 * m) <= most) || 6000;
    const start = new Date(low * 864e5), values = [];
    let index = Math.ceil((12 * start.getUTCFullYear() + start.getUTCMonth()) / months) * months;
    for (; ; index += months) {
      const v = Date.UTC(Math.floor(index / 12), index % 12, 1) / 864e5;
      if (v > high + 1e-9) break;
      if (v >= low - 1e-9) values.push([v, months >= 12 ? String(Math.floor(index / 12)) : moment(v).slice(0, 7)]);
    }
    return values;
  }

  function ticks(low, high, log) {
    if (log) {
      const values = [];
      for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= Math.floor(Math.log10(high) + 1e-9); e++) values.push(10 ** e);
      const keep = Math.ceil(values.length / 6);
      return values.filter((_, i) => i % keep === 0);
    }
    const raw = (high - low) / 5, base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * base).find((s) => s >= raw) || raw;
    const values = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9 * step; v += step) values.push(Number(v.toPrecision(12)));
    return values;
  }
  // Numbers with as many digits as it takes to tell them apart.
  function distinct(values) {
    for (let n = 4; ; n++) {
      const texts = values.map((v) => digits(v, n));
      if (n === 10 || new Set(texts).size === texts.length) return values.map((v, i) => [v, texts[i]]);
    }
  }
  function range(values, given, log) {
    if (given) return given;
    const finite = values.filter(Number.isFinite);
    let low = Math.min(...finite), high = Math.max(...finite);
    if (log) return [low / 1.3, high * 1.3];
    if (low === high) { low -= 1; high += 1; }
    const pad = 0.05 * (high - low);
    return [low - pad, high + pad];
  }
  // series: {kind: line|dots|stems|band|bars, x, y, lower, upper, colour, label, open, r, dashed}
  function chart(parent, o) {
    const all = o.series.filter((s) => !s.quiet);
    const xs = all.flatMap((s) => s.x), ys = all.flatMap((s) => [...(s.y || []), ...(s.lower || []), ...(s.upper || [])]);
    const [x0, x1] = range(xs, o.xrange, o.xlog), [y0, y1] = range(ys, o.yrange, o.ylog);
    // Labels decide the margins: wide numbers on the left, long categories below.
    const ylabels = o.ydates ? dateTicks(y0, y1, 5) : o.yformat ? ticks(y0, y1, o.ylog).map((v) => [v, o.yformat(v)]) : distinct(ticks(y0, y1, o.ylog));
    const widest = ylabels.reduce((most, [, text]) => Math.max(most, text.length), 0);
    const longest = o.names ? o.names.reduce((most, name) => Math.max(most, name.length), 0) : 0;
    const left = Math.max(40, 26 + CHARACTER * widest);
    const room = o.names ? (W - left - 12) / o.names.length : 0;
    const slanted = o.names && CHARACTER * longest > room - 4;
    // More categories than lines of text fit beside each other are labelled in part.
    const every = o.names ? Math.ceil(11 / room) : 1, most = slanted ? 14 : Math.floor(room / CHARACTER);
    const below = slanted ? Math.round(0.6 * CHARACTER * Math.min(longest, 14)) + 4 : 0;
    const M = { left, right: 12, top: 10, bottom: 40 + below };
    const H = 245 + below;
    const f = (v, log) => (log ? Math.log10(Math.max(v, 1e-300)) : v);
    const px = (v) => M.left + ((f(v, o.xlog) - f(x0, o.xlog)) / (f(x1, o.xlog) - f(x0, o.xlog))) * (W - M.left - M.right);
    const py = (v) => H - M.bottom - ((f(v, o.ylog) - f(y0, o.ylog)) / (f(y1, o.ylog) - f(y0, o.ylog))) * (H - M.top - M.bottom);
    const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": o.label });
    for (const [v, text] of ylabels) {
      svg.append(el("line", { class: "grid", x1: M.left, x2: W - M.right, y1: py(v), y2: py(v) }));
      svg.append(el("text", { x: M.left - 7, y: py(v) + 4, "text-anchor": "end" }, text));
    }
    let marks = o.names ? o.names.map((name, i) => [i, cut(name, most)]).filter(([i]) => i % every === 0)
      : o.dates ? dateTicks(x0, x1, 5) : distinct(ticks(x0, x1, o.xlog));
    const space = (W - M.left - M.right) / Math.max(marks.length, 1);
    if (!o.names && marks.some(([, text]) => CHARACTER * text.length > space)) marks = marks.filter((_, i) => i % 2 === 0);
    for (const [v, text] of marks) {
      const x = px(v), y = H - M.bottom + (slanted ? 12 : 17);
      // A label at an end would leave the figure.
      const half = (CHARACTER * text.length) / 2, inside = slanted ? x : Math.max(half, Math.min(x, W - half));
      const mark = el("text", { x: inside, y, "text-anchor": slanted ? "end" : "middle" }, text);
      if (slanted) mark.setAttribute("transform", `rotate(-35 ${x} ${y})`);
      if (o.names) mark.append(el("title", {}, o.names[v]));
      svg.append(mark);
    }
    svg.append(el("line", { class: "axis", x1: M.left, x2: W - M.right, y1: H - M.bottom, y2: H - M.bottom }));
    svg.append(el("text", { x: (M.left + W - M.right) / 2, y: H - 6, "text-anchor": "middle" }, cut(o.xlabel, Math.floor((W - M.left - M.right) / CHARACTER))));
    const side = el("text", { x: 11, y: (H - M.bottom + M.top) / 2, "text-anchor": "middle" }, cut(o.ylabel, Math.floor((H - M.top - M.bottom) / CHARACTER)));
    side.setAttribute("transform", `rotate(-90 11 ${(H - M.bottom + M.top) / 2})`);
    svg.append(side);
    if (o.density && o.density.length) {
      // Rows of the table under the curves, up to a sixth of the height.
      const top = Math.max(...o.density, 1), width = (W - M.left - M.right) / o.density.length;
      o.density.forEach((n, i) => {
        const height = (n / top) * (H - M.top - M.bottom) / 6;
        svg.append(el("rect", { class: "density", x: M.left + i * width, width: Math.max(width - 0.6, 0.4), y: H - M.bottom - height, height }));
      });
    }
    const path = (x, y) => x.map((v, i) => `${i ? "L" : "M"}${px(v).toFixed(1)} ${py(y[i]).toFixed(1)}`).join("");
    for (const s of o.series) {
      const colour = s.colour || COLOURS[0];
      if (s.kind === "band") {
        const back = path([...s.x].reverse(), [...s.upper].reverse()).replace("M", "L");
        svg.append(el("path", { d: `${path(s.x, s.lower)}${back}Z`, fill: "var(--band)" }));
      } else if (s.kind === "line") {
        const drawn = el("path", { d: path(s.x, s.y), fill: "none", stroke: colour, "stroke-width": s.dashed ? 1 : 2 });
        if (s.dashed) drawn.setAttribute("stroke-dasharray", "5 4");
        svg.append(drawn);
      } else if (s.kind === "dots") {
        s.x.forEach((v, i) => {
          const fill = s.open ? "var(--card)" : colour;
          svg.append(el("circle", { cx: px(v), cy: py(s.y[i]), r: s.r || 3, fill, stroke: colour, "stroke-width": s.open ? 2 : 0, opacity: s.opacity || 1 }));
        });
      } else if (s.kind === "stems") {
        s.x.forEach((v, i) => svg.append(el("line", { x1: px(v), x2: px(v), y1: py(s.lower ? s.lower[i] : Math.max(y0, 0)), y2: py(s.upper ? s.upper[i] : s.y[i]), stroke: colour, "stroke-width": 1.5 })));
      } else if (s.kind === "bars") {
        s.x.forEach((v, i) => svg.append(el("rect", { x: px(v) + 1, width: Math.max(px(v + s.width) - px(v) - 2, 1), y: py(s.y[i]), height: Math.max(H - M.bottom - py(s.y[i]), 0), fill: colour, opacity: 0.8 })));
      }
    }
    const mark = el("circle", { r: 5, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" });
    svg.append(mark);
    const points = o.series.filter((s) => s.tooltip).flatMap((s) => s.x.map((v, i) => ({ x: px(v), y: py(s.y[i]), text: s.tooltip(i) })));
    const near = (event) => {
      const box = svg.getBoundingClientRect(), scale = W / box.width;
      const mx = (event.clientX - box.left) * scale, my = (event.clientY - box.top) * scale;
      let best = null, least = Infinity;
      for (const p of points) {
        const d = o.along ? Math.abs(p.x - mx) : (p.x - mx) ** 2 + (p.y - my) ** 2;
        if (d < least) { least = d; best = p; }
      }
      if (!best || (!o.along && least > 900)) { hideTip(); mark.setAttribute("visibility", "hidden"); return; }
      mark.setAttribute("cx", best.x);
      mark.setAttribute("cy", best.y);
      mark.setAttribute("visibility", "visible");
      showTip(best.text, event);
    };
    if (points.length) {
      svg.addEventListener("pointermove", near);
      svg.addEventListener("pointerleave", () => { hideTip(); mark.setAttribute("visibility", "hidden"); });
    }
    parent.append(svg);
    const labelled = o.series.filter((s) => s.label);
    if (labelled.length) {
      parent.append(el("div", { class: "legend" }, ...labelled.map((s) => el("span", {}, el("i", { style: `background:${s.colour || COLOURS[0]}` }), s.label))));
    }
    return svg;
  }

  // Sections -----------------------------------------------------------------
  const C = F.choice, Q = F.quality;
  const predicts = { regression: "predicts the number", classification: "predicts the class", counts: "predicts the count" }[F.task];
  document.title = `${F.target}: winnowgp report`;
  $("title").textContent = F.target;
  $("lead").textContent = `A ${C.layers ? "deep" : "sparse"} Gaussian process ${predicts} “${F.target}” from ${plural(F.columns.length, "column")}, with ${plural(C.points, "inducing point")}${C.resized_from === null ? " selected automatically" : ""}.`;
  for (const section of document.querySelectorAll("main section")) {
    $("contents").append(el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
  }
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = preferred.matches ? "dark" : "light";
  $("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });

  if (F.alarms.length) {
    const sentence = (text) => el("li", {}, ...withCode(text[0].toUpperCase() + text.slice(1)));
    $("alarms").append(el("b", {}, `${plural(F.alarms.length, "thing")} to look at before you use this model`), el("ul", {}, ...F.alarms.map((a) => sentence(a.message))));
    $("alarms").hidden = false;
  }
  const tile = (value, what) => $("tiles").append(el("div", { class: "tile" }, el("b", {}, value), el("span", {}, what)));
  if (Q) {
    tile(F.task === "classification" ? percent(Q.metrics[0].value) : digits(Q.metrics[1].value, 3), `${F.task === "classification" ? "accuracy" : "R²"} on held-out rows`);
    const wide = Q.coverage.find(([level]) => level === 0.95);
    if (wide) tile(percent(wide[1]), "of held-out rows within the 95 % interval");
  }
  const points = C.points === 1 ? "inducing point" : "inducing points";
  tile(String(C.points), C.resized_from === null ? `${points} selected` : `${points}, resized from ${C.resized_from}`);
  tile(digits(C.elbo_gap, 2), "ELBO gap, nats per observation");
  tile(F.train_rows.toLocaleString("en"), "training rows");
  tile(`${digits(F.timings.predict_us, 3)} µs`, "per prediction, in batches of 1,000");

  function quality() {
    const here = $("quality");
    if (!Q) {
      const why = C.resized_from === null ? "No rows were held out (--test-size 0), so the quality of predictions was not measured."
        : `This model was resized from ${plural(C.resized_from, "inducing point")}. Its quality was not measured: the model file does not contain the held-out rows.`;
      here.append(el("p", {}, why));
      return;
    }
    const folds = F.settings.folds;
    const measured = F.settings.batches !== undefined ? `Measured on ${plural(Q.rows, "row")} of the last update, predicted before they were learnt`
      : folds === undefined ? `Measured on ${plural(Q.rows, "row")} not used for training`
      : `Measured on ${plural(Q.rows, "row")} in ${folds} folds, each predicted by a model of the rows of other folds; the model of this page was fitted to all rows`;
    here.append(el("p", { class: "note" }, `${measured}. The constant is the best constant prediction.`));
    table(here, ["", "model", "constant", ""], Q.metrics.map((m) => [m.name, digits(m.value), digits(m.baseline), `${m.better} is better`]), [1, 2]);
    const grid = cards(here);
    const perfect = { kind: "line", x: [0, 1], y: [0, 1], colour: "var(--soft)", dashed: true, label: "perfect" };
    if (Q.coverage.length) {
      const x = Q.coverage.map((c) => c[0]), y = Q.coverage.map((c) => c[1]);
      const tooltip = (i) => `${percent(x[i])} interval: contains ${percent(y[i])} of the rows`;
      chart(card(grid, "Coverage of intervals", "Calibrated intervals lie on the diagonal; intervals above it are too wide, below it too narrow."), {
        label: "Coverage of intervals", xlabel: "nominal level", ylabel: "share of rows inside", xrange: [0, 1], yrange: [0, 1], along: true,
        series: [perfect, { kind: "line", x, y, label: "model" }, { kind: "dots", x, y, tooltip }],
      });
      const expected = Q.rows / Q.pit.length, at = Q.pit.map((_, i) => i / Q.pit.length);
      chart(card(grid, "Probability integral transform", "Ranks of observations within their predictive distribution. Flat: calibrated. Peak in the middle: too wide. Peaks at the ends: too narrow."), {
        label: "Probability integral transform", xlabel: "rank within the predictive distribution", ylabel: "rows", xrange: [0, 1], yrange: [0, 1.15 * Math.max(...Q.pit, expected)], along: true,
        series: [
          { kind: "bars", x: at, y: Q.pit, width: 1 / Q.pit.length, tooltip: (i) => `${i * 10} to ${i * 10 + 10} %: ${plural(Q.pit[i], "row")}` },
          { kind: "line", x: [0, 1], y: [expected, expected], dashed: true, colour: "var(--soft)", label: "expected" },
        ],
      });
    }
    if (Q.residuals) {
      const R = Q.residuals, both = range([...R.actual, ...R.predicted]);
      const tooltip = (i) => `predicted ${digits(R.predicted[i])} ± ${digits(R.sd[i], 2)}\nactual ${digits(R.actual[i])}`;
      chart(card(grid, "Predicted and actual", `${plural(R.actual.length, "held-out row")}.`), {
        label: "Predicted against actual", xlabel: `predicted ${F.target}`, ylabel: "actual", xrange: both, yrange: both,
        series: [{ kind: "line", x: both, y: both, dashed: true, colour: "var(--soft)" }, { kind: "dots", x: R.predicted, y: R.actual, opacity: 0.65, tooltip }],
      });
      const z = R.actual.map((a, i) => (a - R.predicted[i]) / R.sd[i]);
      chart(card(grid, "Residuals", "In predicted standard deviations: about 95 % should lie between the dashed lines."), {
        label: "Residuals", xlabel: `predicted ${F.target}`, ylabel: "residual / sd",
        series: [
          ...[-2, 2].map((v) => ({ kind: "line", x: range(R.predicted), y: [v, v], dashed: true, colour: "var(--soft)" })),
          { kind: "dots", x: R.predicted, y: z, opacity: 0.65, tooltip: (i) => `${tooltip(i)}\n${digits(z[i], 2)} sd` },
        ],
      });
    }
    if (Q.reliability.length) {
      const B = Q.reliability, x = B.map((b) => b.probability), y = B.map((b) => b.frequency);
      const tooltip = (i) => `predicted ${percent(x[i])}, observed ${percent(y[i])}\n${plural(B[i].rows, "prediction")}`;
      chart(card(grid, "Reliability of probabilities", "Calibrated probabilities lie on the diagonal."), {
        label: "Reliability of probabilities", xlabel: "predicted probability", ylabel: "observed frequency", xrange: [0, 1], yrange: [0, 1], along: true,
        series: [perfect, { kind: "line", x, y, label: "model" }, { kind: "dots", x, y, tooltip }],
      });
    }
    if (Q.confusion) {
      const K = Q.confusion, here2 = card(grid, "Confusion matrix", "Rows: true class. Columns: most probable class.");
      const most = Math.max(...K.counts.flat(), 1);
      const shade = (n) => `background:color-mix(in srgb, var(--blue) ${Math.round((70 * n) / most)}%, var(--card))`;
      const body = K.counts.map((row, i) => el("tr", {}, el("th", {}, K.labels[i]), ...row.map((n) => el("td", { style: shade(n) }, String(n)))));
      const head = el("tr", {}, el("th", {}), ...K.labels.map((l) => el("th", {}, l)));
      here2.append(el("div", { class: "scroll" }, el("table", { class: "heat" }, head, ...body)));
    }
  }

  // entries: {name, value, error, text}, in falling order
  function bars(parent, entries) {
    const most = Math.max(...entries.map((e) => e.value + (e.error || 0)), 1e-300), grid = el("div", { class: "bars" });
    const share = (v) => 100 * Math.max(0, Math.min(1, v / most));
    for (const e of entries.slice(0, 20)) {
      const track = el("div", { class: "track" }, el("div", { class: "bar", style: `width:${share(e.value)}%` }));
      if (e.error) track.append(el("div", { class: "error", style: `left:${share(e.value - e.error)}%;width:${share(e.value + e.error) - share(e.value - e.error)}%` }));
      grid.append(el("span", { class: "name" }, e.name), track, el("span", {}, e.text));
    }
    parent.append(grid);
    if (entries.length > 20) parent.append(el("p", { class: "note" }, `${entries.length - 20} more columns are not shown.`));
  }

  function inputs() {
    const here = $("inputs");
    const ranked = F.columns.filter((c) => c.relevance !== null).sort((a, b) => b.relevance - a.relevance);
    const I = F.importance, both = cards(here);
    if (I) {
      const box = card(both, "Importance", `Loss of ${I.measure} on ${plural(I.rows, "held-out row")} if a column is permuted; the dark line is ± one standard error. Columns that carry the same information share their importance.`);
      const lost = (c) => (Math.max(Math.abs(c.loss), c.standard_error) < 1e-4 ? "< 0.0001" : `${digits(c.loss, 2)} ± ${digits(c.standard_error, 1)}`);
      bars(box, I.columns.map((c) => ({ name: c.column, value: c.loss, error: c.standard_error, text: lost(c) })));
    }
    if (ranked.length) {
      const box = card(both, "Inverse lengthscales", "1 / lengthscale of standardised inputs: how quickly predictions change along a column, not how much they depend on it. Near zero: not at all, or linearly.");
      bars(box, ranked.map((c) => ({ name: c.name, value: c.relevance, text: c.relevance < 1e-4 ? "< 0.0001" : digits(c.relevance, 3) })));
    }
    here.append(el("p", { class: "note" }, `How ${F.task === "classification" ? "the probability" : "the prediction"} depends on one column, with all others at their medians or most frequent categories${F.effects.some((e) => e.curves[0].lower.length) ? "; the band is ± 2 sd of the latent function, without noise" : ""}${F.effects.some((e) => e.curves[0].observed) ? "; the lighter one, or the small dots, hold 95 % of observations, with the noise of each place" : ""}${F.effects.some((e) => e.counts.length) ? ". Grey bars: where the rows of the table are" : ""}.`));
    const heights = (effects) => range(effects.flatMap((e) => e.curves.flatMap((c) => [...c.mean, ...c.lower, ...c.upper, ...(c.observed || []).flat()])));
    curves(cards(here), F.effects, F.task === "classification" ? [0, 1] : heights(F.effects), F.task === "classification" ? "probability" : F.target);
    if (F.terms.length) {
      here.append(el("h3", { class: "part" }, "Terms of the kernel"), el("p", { class: "note" }, "What each term of the sum contributes to the latent function along a column, relative to its average over the curve, with all other columns as above. The band is ± 2 sd."));
      curves(cards(here), F.terms, heights(F.terms), F.task === "regression" ? `part of ${F.target}` : "part of the latent function");
    }
  }

  function curves(grid, effects, yrange, ylabel) {
    for (const e of effects) {
      const categorical = e.kind === "category", x = categorical ? e.at.map((_, i) => i) : e.at, series = [];
      e.curves.forEach((c, k) => {
        const colour = COLOURS[k], at = (i) => (categorical ? e.at[i] : e.kind === "date" ? date(e.at[i]) : digits(e.at[i]));
        const tooltip = (i) => `${e.column} = ${at(i)}\n${c.label ? `P(${c.label}) = ` : ""}${digits(c.mean[i])}${c.lower.length ? ` (${digits(c.lower[i], 3)} to ${digits(c.upper[i], 3)})` : ""}`;
        if (categorical) {
          if (c.lower.length) series.push({ kind: "stems", x, y: c.mean, lower: c.lower, upper: c.upper, colour });
          for (const end of c.observed || []) series.push({ kind: "dots", x, y: end, r: 2, colour });
          series.push({ kind: "dots", x, y: c.mean, r: 5, colour, tooltip, label: c.label });
        } else {
          if (c.observed) series.push({ kind: "band", x, lower: c.observed[0], upper: c.observed[1] });
          if (c.lower.length) series.push({ kind: "band", x, lower: c.lower, upper: c.upper });
          series.push({ kind: "line", x, y: c.mean, colour, tooltip, label: c.label });
        }
      });
      const note = e.note ? `${e.note[0].toUpperCase()}${e.note.slice(1)}.` : "";
      chart(card(grid, e.term ? `${e.term}, along ${e.column}` : e.column, note), {
        label: `Effect of ${e.column}`, xlabel: e.column, ylabel, yrange, along: e.curves.length === 1, density: e.counts,
        names: categorical ? e.at : null, dates: e.kind === "date", xrange: categorical ? [-0.5, x.length - 0.5] : [x[0], x[x.length - 1]], series,
      });
    }
  }

  function choice() {
    const here = $("choice");
    const alpha = C.alpha === null ? [] : [["strength α of the prior exp(−α M²) that selects this number", digits(C.alpha, 3)]];
    table(here, ["", ""], [...F.lines.map(([label, text]) => [label, withCode(text)]), ["ELBO, a lower bound on the log evidence", `${digits(C.bound, 6)} nats`], ...alpha]);
    const grid = cards(here);
    if (C.frontier) {
      const x = C.frontier.flatMap((b, i) => (b === null ? [] : [i])), E = C.exact_evidence, L = C.log_densities;
      const best = x.reduce((most, i) => Math.max(most, C.frontier[i]), E === null ? -Infinity : E);
      const gap = (i) => Math.max((best - C.frontier[i]) / C.rows, 1e-5), y = x.map(gap), others = C.sizes.filter((i) => i !== C.points && C.frontier[i] !== null);
      const heldOut = (v) => (v === null || v === undefined ? "" : `\nheld-out log density ${digits(v)} nats per observation`);
      const tooltip = (k) => `${plural(x[k], "inducing point")}: ${digits(C.frontier[x[k]], 6)} nats\nELBO gap ${digits(y[k], 2)} nats per observation${heldOut(L && L[x[k]])}`;
      const floor = Math.max(y.reduce((a, b) => Math.min(a, b)) / 3, 1e-5);
      const exact = E === null ? [] : [{ kind: "line", x: [x[0], x[x.length - 1]], y: [floor, floor], dashed: true, colour: COLOURS[3], label: `full GP, all ${C.rows} rows (no gap)` }];
      const models = others.length ? [{ kind: "dots", x: others, y: others.map(gap), r: 4, label: "available as a model" }] : [];
      chart(card(grid, "ELBO gap for each number of inducing points", `Difference ${E === null ? "to the best ELBO" : `to the full GP, which would gain ${digits(Math.max(E - C.bound, 0) / C.rows, 2)} nats per observation`}, for the best model known of each size, under its own hyper-parameters. Hover to see the values.`), {
        label: "Frontier", xlabel: "number of inducing points", ylabel: "ELBO gap, nats per observation", ylog: true, along: true,
        series: [
          { kind: "line", x, y, tooltip }, ...exact, ...models,
          { kind: "dots", x: [C.points], y: [gap(C.points)], open: true, r: 6, colour: COLOURS[1], label: `${C.points} selected` },
        ],
      });
    }
    if (C.allocations) {
      const A = C.allocations, x = A.map((a) => a.predict_us), gap = (a) => Math.max(a.elbo_gap, 1e-5), y = A.map(gap), name = (a) => a.points.join(" + ");
      const tooltip = (k) => `${name(A[k])} inducing points: ${digits(x[k], 3)} µs per row\nELBO gap ${digits(y[k], 2)} nats per observation${A[k].log_density === null ? "" : `\nheld-out log density ${digits(A[k].log_density)}`}`;
      const own = A.filter((a) => name(a) === C.layers.join(" + "));
      chart(card(grid, "Allocations of inducing points to layers", "ELBO gap of the models that were trained, against the time of a prediction. Hover to see the values."), {
        label: "Allocations", xlabel: "prediction, µs per row", ylabel: "ELBO gap, nats per observation", ylog: true,
        series: [
          { kind: "line", x, y }, { kind: "dots", x, y, r: 4, tooltip },
          { kind: "dots", x: own.map((a) => a.predict_us), y: own.map(gap), open: true, r: 6, colour: COLOURS[1], label: `${C.layers.join(" + ")} selected` },
        ],
      });
    }
    if (!C.inclusion.length) return;
    const sorted = [C.inclusion.slice(0, C.points), C.inclusion.slice(C.points)].map((part) => [...part].sort((a, b) => b - a));
    const series = sorted.flatMap((y, k) => {
      const x = y.map((_, i) => i + (k ? C.points : 0)), colour = COLOURS[k];
      return [{ kind: "stems", x, y, colour }, { kind: "dots", x, y, colour, r: 2.5, tooltip: (i) => `${k ? "not selected" : "selected"}: ${percent(y[i])}`, label: k ? `${y.length} not selected` : `${y.length} selected` }];
    });
    chart(card(grid, "Inclusion probabilities", "Probability of each final candidate under the variational point process q(Z)."), {
      label: "Inclusion", xlabel: "candidate", ylabel: "probability", yrange: [0, 1.02], along: true, series,
    });
  }

  function training() {
    const here = $("training"), T = F.training, steps = T.moments;
    if (!steps.length) { here.append(el("p", {}, "No steps were recorded.")); return; }
    here.append(el("p", { class: "note" }, "Move the slider to see the inducing points and the objective at each recorded step."));
    const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, id: "step", "aria-label": "Training step" });
    const play = el("button", { type: "button", id: "play" }, "▶ play"), now = el("p", { id: "now" });
    here.append(el("div", { class: "player" }, play, slider), now);
    const grid = cards(here), left = card(grid, "Inducing points"), right = card(grid, "Objective");
    const two = T.inputs.length > 1;
    const xr = range(steps.flatMap((m) => m.x)), yr = two ? range(steps.flatMap((m) => m.y)) : [0, 1];
    const seen = steps.filter((m) => m.objective !== null);
    const top = Math.max(...seen.map((m) => m.objective)), floor = Math.min(...seen.slice(Math.floor(seen.length / 10)).map((m) => m.objective));
    const orange = range([floor, top]);
    function show(i) {
      const m = steps[i];
      for (const box of [left, right]) for (const old of box.querySelectorAll("svg, .legend")) old.remove();
      const y = two ? m.y : m.x.map((_, k) => (k + 0.5) / m.x.length);
      chart(left, {
        label: "Inducing points", xlabel: T.inputs[0], ylabel: two ? T.inputs[1] : "", xrange: xr, yrange: yr, yformat: two ? null : () => "",
        dates: isDate(T.inputs[0]), ydates: two && isDate(T.inputs[1]),
        series: [{ kind: "dots", x: m.x, y, open: true, r: 4, tooltip: (k) => `${T.inputs[0]} ${value(T.inputs[0], m.x[k])}${two ? `\n${T.inputs[1]} ${value(T.inputs[1], m.y[k])}` : ""}` }],
      });
      const clamp = (v) => Math.max(v, orange[0]);
      const here2 = m.objective === null ? [] : [{ kind: "dots", x: [m.step], y: [clamp(m.objective)], r: 6, open: true, colour: COLOURS[1], label: "this step" }];
      chart(right, {
        label: "Objective", xlabel: "step", ylabel: "objective (nats)", yrange: orange, along: true,
        series: [{ kind: "line", x: seen.map((s) => s.step), y: seen.map((s) => clamp(s.objective)), tooltip: (k) => `step ${seen[k].step}, ${seen[k].phase}\n${digits(seen[k].objective, 6)} nats, ${plural(seen[k].x.length, "inducing point")}` }, ...here2],
      });
      now.textContent = `Step ${m.step} of ${steps[steps.length - 1].step} (${m.phase}): ${plural(m.x.length, "inducing point")}${m.objective === null ? "" : `, ${digits(m.objective, 6)} nats`}`;
    }
    slider.addEventListener("input", () => show(Number(slider.value)));
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶ play"; };
    play.addEventListener("click", () => {
      if (timer) { stop(); return; }
      if (Number(slider.value) === steps.length - 1) slider.value = 0;
      play.textContent = "❚❚ pause";
      show(Number(slider.value));
      timer = setInterval(() => {
        slider.value = Number(slider.value) + 1;
        show(Number(slider.value));
        if (Number(slider.value) >= steps.length - 1) stop();
      }, 120);
    });
    show(steps.length - 1);
  }

  function data() {
    const here = $("data");
    here.append(el("p", {}, `${F.rows.toLocaleString("en")} rows; ${F.train_rows.toLocaleString("en")} of them were used for training. Task of “${F.target}”: ${F.task} (${F.why_task}).`));
    const describe = (c) => (c.kind === "category" ? `${c.different} ${c.different === 1 ? "category" : "categories"}: ${c.categories.map(([w, n]) => `${w} (${n})`).join(", ")}${c.different > c.categories.length ? ", …" : ""}`
      : c.spread.map((v) => (c.kind === "date" ? date(v) : digits(v))).join(" · "));
    const kinds = { number: "number", date: "date", category: "categorical" };
    table(here, ["column", "kind", "missing", "minimum · quartiles · maximum, or most frequent categories"],
      [F.target_summary, ...F.columns].map((c, i) => [i ? c.name : `${c.name} (target)`, kinds[c.kind], String(c.missing), describe(c)]), [2]);
  }

  function settings() {
    const here = $("settings"), S = { ...F.settings };
    if (S.command) {
      const copy = el("button", { type: "button", id: "copy" }, "copy");
      copy.addEventListener("click", async () => {
        try { await navigator.clipboard.writeText(S.command); copy.textContent = "copied"; }
        catch { getSelection().selectAllChildren($("command")); copy.textContent = "selected"; }
      });
      here.append(el("p", {}, "This command, with these versions, reproduces the model:"), el("pre", { id: "command" }, S.command), copy);
      delete S.command;
    }
    table(here, ["", ""], [["fit", `${digits(F.timings.fit_s, 3)} s`], ["kernel", F.kernel], ["noise, standard deviation", digits(F.noise_sd, 3)], ...Object.entries(S)]);
  }

  for (const part of [quality, inputs, choice, training, data, settings]) part();
})();
