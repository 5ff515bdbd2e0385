"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent), planned = JSON.parse(document.getElementById("plan-data").textContent);
  const $ = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, text, attributes = {}) => {
    const e = document.createElement(tag);
    if (text !== null && text !== undefined) e.textContent = text;
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    return e;
  };
  const size = (n) => n >= 1e12 ? (n / 1e12).toFixed(2) + " TB" : n >= 1e9 ? (n / 1e9).toFixed(2) + " GB" : n >= 1e6 ? (n / 1e6).toFixed(1) + " MB" : (n / 1e3).toFixed(1) + " kB";
  const share = (x) => x === null ? "" : (100 * x).toFixed(2) + " %";
  const percent = (x, digits = 2) => (x >= 0 ? "+" : "−") + Math.abs(100 * x).toFixed(digits) + " %";
  const charts = {};
  const draw = (id, config) => { if (charts[id]) charts[id].destroy(); charts[id] = new Chart($(id), config); };

  // Names beside points: tried at eight places, the first free one is taken; a point that has none keeps its tooltip.
  const names = {
    id: "names",
    afterDatasetsDraw(chart) {
      const ctx = chart.ctx, taken = [];
      ctx.save();
      const font = "12px system-ui, 'DejaVu Sans', sans-serif";
      ctx.textBaseline = "middle";
      chart.data.datasets.forEach((set, d) => set.unnamed || chart.getDatasetMeta(d).data.forEach((p) => taken.push([p.x - 6, p.y - 6, p.x + 6, p.y + 6])));
      chart.data.datasets.forEach((set, d) => {
        if (set.unnamed) return;
        ctx.fillStyle = set.nameColor ?? set.borderColor;
        ctx.font = set.bold ? "600 " + font : font;
        chart.getDatasetMeta(d).data.forEach((p, i) => {
          const name = set.data[i].name, w = ctx.measureText(name).width, r = Math.max(0, (p.options.radius ?? 6) - 6);
          const places = [[9 + r, 0], [-9 - r - w, 0], [-w / 2, -13 - r], [-w / 2, 13 + r], [7 + r, -11 - r], [7 + r, 11 + r], [-7 - r - w, -11 - r], [-7 - r - w, 11 + r]];
          for (const [dx, dy] of places) {
            const box = [p.x + dx - 1, p.y + dy - 7, p.x + dx + w + 1, p.y + dy + 7], area = chart.chartArea;
            if (box[0] < area.left || box[2] > chart.width || box[1] < 0 || box[3] > area.bottom) continue;
            if (taken.some((t) => box[0] < t[2] && box[2] > t[0] && box[1] < t[3] && box[3] > t[1])) continue;
            taken.push(box);
            ctx.fillText(name, p.x + dx, p.y + dy);
            break;
          }
        });
      });
      ctx.restore();
    },
  };
  const axis = (title, more = {}) => ({
    title: { display: true, text: title, color: css("--soft") }, ticks: { color: css("--soft") }, grid: { color: css("--line") }, border: { color: css("--line") }, ...more,
  });
  const short = (v) => { const x = Number(v); return x >= 1e9 ? x / 1e9 + " GB" : x >= 1e6 ? x / 1e6 + " MB" : x >= 1e3 ? x / 1e3 + " kB" : x; };
  const decade = (v) => [1, 2, 5].some((m) => Math.abs(Math.log10(v / m) - Math.round(Math.log10(v / m))) < 1e-6);

  function answer() {
    const radius = (p) => p.speed === null ? 5 : 8 * Math.sqrt(p.speed), points = data.answer.filter((p) => p.bits !== null && p.kl > 0);
    const set = (label, keep, color, more) => {
      const mine = points.filter(keep);
      return { label, data: mine.map((p) => ({ x: p.bits, y: p.kl, name: p.name, row: p })), pointRadius: mine.map(radius), pointHoverRadius: mine.map((p) => radius(p) + 2),
        borderColor: css(color), backgroundColor: mine.map((p) => p.speed === null ? "transparent" : css(color) + (more.bold ? "" : "55")), borderWidth: 1.5, ...more };
    };
    const phone = window.innerWidth < 640, ours = (p) => p.kind === "kvbits" && p.name !== "raw";
    draw("answer", {
      type: "scatter", plugins: [names],
      data: { datasets: [
        set("recommended", (p) => p.recommended, "--ours", { bold: true, nameColor: css("--text") }),
        set("lossless", (p) => p.name === "raw", "--base", {}),
        set("other presets", (p) => ours(p) && !p.recommended, "--ours", { unnamed: phone }),
        set("Transformers' own", (p) => p.kind === "stock", "--stock", { pointStyle: "triangle", unnamed: phone }),
        set("simulated only", (p) => p.kind === "simulated", "--purple", { pointStyle: "rect", unnamed: phone }),
      ].filter((s) => s.data.length) },
      options: {
        animation: false, maintainAspectRatio: false, layout: { padding: { right: 24, top: 24 } },
        scales: {
          x: axis("bits per cached number", { min: 2, max: 1 + Math.ceil(Math.max(...points.map((p) => p.bits))) }),
          y: axis("KL of the worst model, nats (log)", { type: "logarithmic", ticks: { color: css("--soft"), callback: (v) => decade(v) ? v : null } }),
        },
        plugins: {
          legend: { position: "bottom", labels: { color: css("--text"), usePointStyle: true } },
          tooltip: { callbacks: { label: (c) => { const p = c.raw.row; return [`${p.name}: ${p.bits.toFixed(2)} bits, KL ${p.kl.toPrecision(2)} nats`, `worst of ${p.models} model${p.models === 1 ? "" : "s"}`, p.speed === null ? "not timed on a GPU" : `on a GPU ${p.speed.toFixed(2)} times as fast as 16 bits`]; } } },
        },
      },
    });
    const raw = points.find((p) => p.name === "raw" && p.speed !== null);
    const most = Math.max(...points.map((p) => p.models)), fewer = points.filter((p) => p.models < most).map((p) => p.name);
    const served = fewer.length ? ` Measured on fewer than ${most} models: ${fewer.join(", ")}.` : "";
    $("answer-note").textContent = points.some((p) => p.speed !== null) ? "Size of a mark: speed of attention on a GPU over the fastest 16-bit kernel's, the middle of the shapes measured"
      + (raw ? ` (raw: ${raw.speed.toFixed(2)} times as fast)` : "") + ". Hollow marks were not timed there." + served : "";
  }

  function pareto() {
    const model = data.models[$("pareto-model").value], measure = $("pareto-measure").value;
    const value = (r) => measure === "kl" ? r.kl : measure === "ppl" ? 100 * r.ppl_change : 100 * (1 - r.mass);
    const rows = model.rows.filter((r) => r.kind !== "base" && r.held_bits !== null && (measure !== "kl" || r.kl > 0));
    const set = (kind, label, color, pointStyle) => ({
      label, borderColor: css(color), backgroundColor: css(color), pointStyle, pointRadius: 6, pointHoverRadius: 8, borderWidth: 1.5,
      data: rows.filter((r) => r.kind === kind).map((r) => ({ x: r.held_bits, y: value(r), name: r.scheme, row: r })),
    });
    const titles = { kl: "KL divergence, nats (log)", ppl: "perplexity against the 16-bit cache, %", mass: "probability mass that moved, %" };
    draw("pareto", {
      type: "scatter", plugins: [names],
      data: { datasets: [set("kvbits", "kvbits", "--ours", "circle"), set("stock", "Transformers' quantized caches", "--stock", "triangle")].filter((s) => s.data.length) },
      options: {
        animation: false, maintainAspectRatio: false, layout: { padding: { right: 24, top: 18 } },
        scales: {
          x: axis("bits held per cached number"),
          y: axis(titles[measure], measure === "kl" ? { type: "logarithmic", ticks: { color: css("--soft"), callback: (v) => decade(v) ? v : null } } : {}),
        },
        plugins: {
          legend: { position: "bottom", labels: { color: css("--text"), usePointStyle: true } },
          tooltip: { callbacks: { label: (c) => { const r = c.raw.row; return [`${r.scheme}: ${r.held_bits.toFixed(2)} bits held`, `KL ${r.kl.toPrecision(3)} nats, perplexity ${percent(r.ppl_change)}`, `mass matched ${(100 * r.mass).toFixed(2)} %`]; } } },
        },
      },
    });
    const table = $("pareto-table");
    table.replaceChildren(head(["cache", "bits held", "memory", "perplexity", "change", "± s.e.", "KL", "KL 99 %", "worst KL", "at token", "above 1 nat", "read raw", "mass matched", "top-1", "same top token", "speed"]), body(model.rows.map((r) => ({
      kind: r.kind, cells: [r.scheme, r.held_bits?.toFixed(2), r.reduction ? r.reduction.toFixed(2) + "x less" : "", r.ppl.toFixed(3), percent(r.ppl_change), r.se === null ? "" : (100 * r.se).toFixed(2) + " %",
        r.kl.toPrecision(3), r.kl_p99.toPrecision(3), r.kl_max.toPrecision(3), r.kl_worst?.toLocaleString("en"), share(r.kl_lost), share(r.read_raw), (100 * r.mass).toFixed(2) + " %", (100 * r.top1).toFixed(2) + " %", `${Math.round(r.top1 * r.tokens).toLocaleString("en")} of ${r.tokens.toLocaleString("en")}`, r.speed === null ? "" : r.speed.toFixed(2) + "x"],
    }))));
    $("pareto-note").textContent = `${model.title}: ${model.note}`;
  }
  const head = (cells) => { const h = make("thead"), r = make("tr"); cells.forEach((c) => r.append(make("th", c, { scope: "col" }))); h.append(r); return h; };
  const body = (rows) => {
    const b = make("tbody");
    rows.forEach(({ kind, cells }) => { const r = make("tr"); cells.forEach((c) => r.append(make("td", c ?? "", kind === "stock" ? { class: "stock" } : {}))); b.append(r); });
    return b;
  };

  function memory() {
    const model = planned.models[$("memory-shape").value], of = (scheme) => contexts.map((context) => ({ x: context, y: plan.bytes(planned, model, scheme, context) }));
    const contexts = [];
    for (let c = 256; c <= 262144; c *= 2) contexts.push(c);
    const palette = ["--ours", "--green", "--purple"], dashes = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
    const lines = [["16-bit", of("bf16")], ...data.lines.filter((s) => model.schemes[s]).map((s) => [s, of(s)])];
    const colour = (i) => css(i ? palette[(i - 1) % 3] : "--base");
    draw("memory", {
      type: "line",
      data: { datasets: lines.map(([label, points], i) => ({ label, data: points, borderColor: colour(i), backgroundColor: colour(i), borderDash: dashes[i ? Math.floor((i - 1) / 3) % 4 : 0], borderWidth: 2, pointRadius: 0, pointHitRadius: 12 })) },
      options: {
        animation: false, maintainAspectRatio: false, interaction: { mode: "index", intersect: false },
        scales: {
          x: axis("context, tokens (log)", { type: "logarithmic", min: 256, max: 262144, afterBuildTicks: (a) => { a.ticks = contexts.filter((c, i) => i % 2 === 0).map((value) => ({ value })); }, ticks: { color: css("--soft"), callback: (v) => v >= 1024 ? v / 1024 + "k" : v } }),
          y: axis("cache of one sequence (log)", { type: "logarithmic", ticks: { color: css("--soft"), callback: (v) => decade(v) ? short(v) : null } }),
        },
        plugins: { legend: { position: "bottom", labels: { color: css("--text"), boxWidth: 26, boxHeight: 0 } }, tooltip: { callbacks: { title: (c) => Number(c[0].raw.x).toLocaleString("en") + " tokens", label: (c) => `${c.dataset.label}: ${size(c.raw.y)}` } } },
      },
    });
  }

  function heat(table, columns, rows, format, top, first = "") {
    const cap = make("tr");
    [first, ...columns].forEach((c) => cap.append(make("th", c, { scope: "col" })));
    const h = make("thead"), b = make("tbody");
    h.append(cap);
    rows.forEach(({ name, kind, values, titles, texts }) => {
      const r = make("tr");
      r.append(make("td", name, kind === "stock" ? { class: "stock" } : {}));
      values.forEach((v, i) => {
        const share = v === null ? 0 : Math.max(0, Math.min(1, v / top));
        const cell = make("td", v === null ? "" : texts ? texts[i] : format(v), { style: `background: color-mix(in srgb, var(--heat) ${Math.round(85 * share)}%, var(--bg)); color: ${share > 0.8 ? "var(--bg)" : "var(--text)"}` });
        if (titles) cell.title = titles[i];
        r.append(cell);
      });
      b.append(r);
    });
    table.replaceChildren(h, b);
  }
  function layers() {
    const model = data.models[$("layers-model").value], measure = $("layers-measure").value;
    const rows = model.attention.map((a) => ({ name: a.scheme, kind: a.kind, values: a[measure], titles: a[measure].map((v, i) => `${a.scheme}, layer ${i}: ${v === null ? "" : v.toFixed(4)}`) }));
    const all = rows.flatMap((r) => r.values).filter((v) => v !== null).sort((a, b) => a - b);
    heat($("layers"), model.attention[0][measure].map((v, i) => i), rows, (v) => v < 0.005 ? "0" : v >= 1 ? v.toFixed(1) : v.toFixed(2).replace(/^0/, ""), Math.max(all[Math.floor(0.97 * all.length)], 0.05), "layer");
  }
  function kernels() {
    const group = data.kernels[$("kernels-group").value];
    $("kernels-note").textContent = group.note;
    draw("kernels", {
      type: "bar",
      data: { labels: group.bars.map((b) => b.label), datasets: [{ data: group.bars.map((b) => b.value), backgroundColor: group.bars.map((b) => css(b.kind === "stock" ? "--stock" : "--ours")), barPercentage: 0.75 }] },
      options: {
        animation: false, maintainAspectRatio: false, indexAxis: "y",
        scales: { x: axis(group.unit, { beginAtZero: true }), y: axis("", { title: { display: false }, ticks: { color: css("--text"), autoSkip: false } }) },
        plugins: { legend: { display: false }, tooltip: { callbacks: { label: (c) => `${c.raw} ${group.unit}` } } },
      },
    });
  }

  const all = [["answer", answer, []], ["pareto", pareto, ["pareto-model", "pareto-measure"]], ["memory", memory, ["memory-shape"]], ["layers", layers, ["layers-model", "layers-measure"]],
    ["kernels", kernels, ["kernels-group"]]].filter(([id]) => $(id));
  const redraw = () => all.forEach(([, f]) => f());
  all.forEach(([, f, inputs]) => inputs.forEach((i) => $(i).addEventListener("input", f)));
  const dark = () => document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  $("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
  document.documentElement.dataset.ready = "yes";
})();
