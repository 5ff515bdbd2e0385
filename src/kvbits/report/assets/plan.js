"use strict";
// The arithmetic of `kvbits plan` (kvbits/planner.py, kvbits/spec/cache.py) on what kvbits/report/plan_page.py made of models and presets.
const plan = (() => {
  // Most pages of each pool that one sequence of `tokens` holds (LayerGroup.pages_for).
  function pages(format, tokens, window) {
    const { page, residual, sinks, raw } = format;
    const alive = (n) => {
      const visible = window === null ? 0 : Math.max(0, Math.max(0, n - 1) - window + 1);
      const dead = Math.floor(Math.max(0, visible - sinks) / page);
      return Math.max(0, (raw ? Math.max(0, Math.ceil((n - sinks) / page)) : Math.max(0, Math.floor((n - sinks - residual - 1) / page))) - dead);
    };
    let grown = alive(tokens);
    if (window !== null) {
      grown = 0;
      for (let n = Math.max(0, tokens - 2 * page); n <= tokens; n++) grown = Math.max(grown, alive(n));
      if (raw) grown = Math.max(grown, tokens > sinks ? 1 : 0);
    }
    const tail = Math.min(Math.ceil((residual + page) / page), Math.max(0, Math.ceil((tokens - sinks) / page)));
    const closed = raw ? 0 : grown, young = format.tiers.reduce((sum, [, n]) => sum + n, 0);
    const held = { sink: sinks && tokens ? 1 : 0, closed: Math.max(0, closed - young), tail: raw ? grown : tail };
    for (const [pool, n, more] of format.tiers) held[pool] = n ? Math.min(closed, n + more) : 0;
    for (const [pool, n] of format.copies) held[pool] = Math.min(closed, n);
    return held;
  }
  // Kv heads on each of `gpus` GPUs; null where they cannot be shared so (planner.rank).
  const shared = (heads, gpus) => heads % gpus && gpus % heads ? null : Math.max(1, Math.floor(heads / gpus));
  // Bytes of one sequence on each GPU; "bf16" is the stock cache.
  function bytes(data, model, scheme, tokens, gpus = 1) {
    let total = Math.ceil(model.state / gpus);
    if (scheme === "bf16") {
      for (const [count, heads, key, value, window] of model.layers)
        total += 2 * count * shared(heads, gpus) * (key + value) * (window === null ? tokens : Math.min(tokens, window - 1));
      return total;
    }
    if (model.vllm?.[scheme]) {
      const [block, parts] = model.vllm[scheme], all = Math.ceil(tokens / block);
      for (const [kind, count, size] of parts) {
        const [, heads, , , window] = model.layers[kind];
        total += size * count * shared(heads, gpus) * (window === null ? all : Math.min(all, Math.ceil((window - 1) / block) + 1));
      }
      return total;
    }
    for (const [kind, count, number] of model.schemes[scheme]) {
      const [, heads, , , window] = model.layers[kind], format = data.formats[number], held = pages(format, tokens, window);
      let one = 0;
      for (const [pool, n] of Object.entries(held)) one += format.heads[pool] * n;
      total += one * count * shared(heads, gpus);
    }
    return total;
  }
  // Most tokens of each of `batch` sequences; null where any number fits (planner.max_context).
  function longest(of, left, batch) {
    let low = 0, high = 1;
    while (of(high) * batch <= left) {
      if (high >= 2 ** 40) return null;
      [low, high] = [high, 2 * high];
    }
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (of(middle) * batch <= left) low = middle; else high = middle;
    }
    return low;
  }
  // No context is longer than the model was made for.
  const within = (n, most) => most === null || most === undefined ? n : n === null ? most : Math.min(n, most);
  // ask: {memory, gpus, context, batch} -> {left, share, kept, rows: [{scheme, total, users, more, longest}]}, or {refused}.
  function rows(data, model, ask) {
    const { memory, gpus, context, batch } = ask;
    if (model.heads !== null && model.heads % gpus) return { refused: `${model.heads} query heads cannot be shared by ${gpus} GPUs.` };
    const kind = model.layers.find(([, heads]) => shared(heads, gpus) === null);
    if (kind) return { refused: `${kind[1]} kv heads cannot be shared by ${gpus} GPUs.` };
    const share = Math.ceil(model.weights / gpus), kept = Math.floor(data.reserve * memory), left = memory - share - kept;
    if (left < 1) return { share, kept, left, refused: "Nothing is left for a cache: more or larger GPUs, or quantized weights." };
    const found = ["bf16", ...Object.keys(model.schemes), ...Object.keys(model.vllm ?? {})].map((scheme) => {
      const of = (tokens) => bytes(data, model, scheme, tokens, gpus);
      return { scheme, total: of(context) * batch, users: Math.floor(left / of(context)), longest: within(longest(of, left, batch), model.longest) };
    });
    found.forEach((r) => { r.more = found[0].total / r.total; });
    return { share, kept, left, rows: found };
  }
  // A model of a config.json: decoders whose layers are all alike, whose every number is stated. Anything else is refused, never guessed.
  function read(data, text) {
    let c;
    try { c = JSON.parse(text); } catch { throw Error("This is not JSON; paste the whole config.json."); }
    const family = data.plain[c?.model_type], way = "run `kvbits plan config.json --html page.html`";
    if (!family) throw Error(`The page reads ${Object.keys(data.plain).join(", ")}, not ${c?.model_type}; ${way}.`);
    const asked = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings", ...family.stated];
    for (const name of asked) if (c[name] === undefined) throw Error(`The config.json states no ${name}; ${way}.`);
    const [layers, h, inner, heads, kv, words, longest] = asked.map((name) => c[name]), head = c.head_dim ?? h / heads, window = c.use_sliding_window === false ? null : c.sliding_window ?? null;
    const odd = ["attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"].find((name) => c[name]) ?? (c.layer_types?.some((t) => t !== "full_attention") ? "layer_types" : null);
    if (odd) throw Error(`The page does not read ${odd}; ${way}.`);
    if (![layers, h, inner, heads, kv, words, longest, head].every((n) => Number.isInteger(n) && n > 0) || (window !== null && !(Number.isInteger(window) && window > 0))) throw Error("A number in the config.json is invalid.");
    if (!data.widths[head]) throw Error(`Heads of ${head} channels are not on this page (${Object.keys(data.widths).join(", ")} are); ${way}.`);
    const of_heads = heads * head, of_kv = 2 * kv * head, vectors = 2 * h + (family.qkv_bias ? of_heads + of_kv : 0) + (family.head_norms ? 2 * head : 0);
    const parameters = words * h * (c.tie_word_embeddings ? 1 : 2) + h + layers * (2 * h * of_heads + h * of_kv + 3 * h * inner + vectors);
    const schemes = Object.fromEntries(Object.entries(data.widths[head]).map(([name, number]) => [name, [[0, layers, number]]]));
    return { weights: 2 * parameters, heads, longest, state: 0, layers: [[layers, kv, head, head, window]], schemes, biased: family.qkv_bias };
  }
  return { bytes, rows, read };
})();

if (typeof document !== "undefined") (() => {
  const data = JSON.parse(document.getElementById("plan-data").textContent), $ = (id) => document.getElementById(`plan-${id}`);
  const size = (n) => n >= 1e9 ? (n / 1e9).toFixed(2) + " GB" : (n / 1e6).toFixed(1) + " MB", number = (n) => n.toLocaleString("en");
  const cell = (text, tag = "td") => { const e = document.createElement(tag); e.textContent = text; return e; };
  const barred = (text, share, kind) => {
    const e = cell(text), bar = document.createElement("div");
    bar.className = `bar ${kind}`;
    bar.style.width = `${100 * share}%`;
    e.className = "barcell";
    e.append(bar);
    return e;
  };
  let pasted = null;

  // One cache's bar of users: name, bar, number.
  const big = (r, title, most, kind) => {
    const row = document.createElement("div"), track = document.createElement("div"), bar = document.createElement("div");
    row.className = `bigbar ${kind}`;
    bar.className = "bar";
    bar.style.width = `${100 * r.users / most}%`;
    track.append(bar);
    row.append(cell(title, "span"), track, cell(`${number(r.users)} ${r.users === 1 ? "user" : "users"}` + (r.more === null || kind === "base" ? "" : `, ${r.more.toFixed(1)}x`), "span"));
    return row;
  };

  function draw() {
    const name = $("model").value, model = pasted ?? data.models[name], card = $("card").value, preset = $("preset").value, served = $("engine").value === "vLLM";
    const ask = { memory: data.cards[card], gpus: +$("gpus").value, context: Math.round(2 ** +$("context").value), batch: +$("batch").value };
    $("context-is").textContent = number(ask.context);
    $("batch-is").textContent = number(ask.batch);
    const found = plan.rows(data, model, ask), each = ask.gpus === 1 ? "The GPU" : `Each of ${ask.gpus} GPUs`;
    $("left").textContent = (found.left === undefined ? "" : `${each}: ${size(ask.memory)} − ${size(found.share)} of weights − ${size(found.kept)} reserve = ${size(Math.max(0, found.left))} for the cache. `)
      + (found.refused ?? "") + (model.longest && ask.context > model.longest ? ` The model itself was made for ${number(model.longest)} tokens.` : "");
    const of = served ? "vLLM " : "", chosen = served ? `vLLM kvbits_${preset}` : preset, sixteen = `${of}bf16`;
    const rows = (found.rows ?? []).filter((r) => r.scheme.startsWith("vLLM ") === served), title = (r) => r.scheme === sixteen ? "16 bits" : r.scheme.slice(of.length);
    const mine = rows.find((r) => r.scheme === chosen), base = rows.find((r) => r.scheme === sixteen);
    const context = (r) => r.longest === null ? "any" : number(r.longest);
    const people = (n) => `${number(n)} ${n === 1 ? "user" : "users"}`;
    $("answer").textContent = mine && base ? `With ${title(mine)}, ${people(mine.users)} of ${number(ask.context)} tokens fit, instead of ${number(base.users)} with 16 bits. `
      + `If ${people(ask.batch)} share the memory, each can have ${context(mine)} tokens instead of ${context(base)}.` : rows.length ? `${served ? "vLLM" : "Transformers"} has no ${preset} for this model.` : "";
    const kind = (r) => r.scheme === sixteen ? "base" : r.scheme === chosen ? "chosen" : "";
    const charted = rows.filter((r) => served || kind(r) || data.charted.includes(r.scheme)), most = Math.max(1, ...charted.map((r) => r.users));
    $("bars").replaceChildren(...charted.map((r) => big(r, title(r), most, kind(r))));
    const speeds = pasted || served || ask.gpus > 1 ? {} : data.speed[name]?.[card] ?? {}, timed = rows.some((r) => speeds[r.scheme]);
    const head = document.createElement("tr");
    ["cache", "users that fit", `longest context of ${people(ask.batch)}`, `memory of ${people(ask.batch)}`, ...(timed ? ["tokens a second (users x tokens)"] : [])].forEach((c) => { const th = cell(c, "th"); th.scope = "col"; head.append(th); });
    $("head").replaceChildren(rows.length ? head : "");
    const top = Math.max(1, ...rows.map((r) => r.longest ?? 0));
    $("rows").replaceChildren(...rows.map((r) => {
      const row = document.createElement("tr");
      if (r.scheme === chosen) row.style.fontWeight = "600";
      row.append(cell(title(r)), cell(number(r.users)), barred(context(r), r.longest === null ? 1 : r.longest / top, kind(r)), cell(size(r.total)));
      if (timed) row.append(cell(speeds[r.scheme] ?? "not measured"));
      return row;
    }));
    $("about").textContent = data.descriptions[preset] ? `${preset}: ${data.descriptions[preset]}.` : "";
    $("command").textContent = `kvbits plan ${pasted ? "config.json" : "MODEL"} --gpu-memory ${/ /.test(card) ? `"${card}"` : card} --gpus ${ask.gpus} --context ${ask.context} --batch-size ${ask.batch}${served ? " --engine vllm" : " --scheme all"}`;
  }
  const paste = () => {
    pasted = null;
    try {
      if ($("paste").value.trim()) pasted = plan.read(data, $("paste").value);
      $("paste-says").textContent = pasted ? `Shown: the pasted model, ${size(pasted.weights)} of weights in 16 bits.` : "";
    } catch (e) { $("paste-says").textContent = `${e.message} Shown: ${$("model").value}.`; }
    draw();
  };
  $("model").addEventListener("input", () => { $("paste").value = ""; paste(); });
  for (const id of ["card", "gpus", "engine", "preset", "context", "batch"]) $(id).addEventListener("input", draw);
  $("paste").addEventListener("input", paste);
  draw();
})();
