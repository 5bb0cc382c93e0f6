// The page docs/explore.md. It computes everything in the browser, without other code or data.
"use strict";

(() => {
  // ---- Fixed-point numbers: a BigInt in units of 2^-256 --------------------------------------

  const ONE = 1n << 256n;
  const TWO_PI =
    628318530717958647692528676655900576839433879875021164194988918461563281257241799n * ONE / 10n ** 80n;
  const multiply = (a, b) => (a * b) >> 256n;
  const divide = (a, b) => (a << 256n) / b;
  const toNumber = (x) => Number(x) / 2 ** 256;

  /** The exact value of a float64. */
  function exactly(number) {
    let bits = 256n;
    for (; !Number.isInteger(number); number *= 2) bits--;
    return BigInt(number) << bits;
  }

  /** e^x: the series for x / 2^16, squared 16 times. */
  function exp(x) {
    let sum = ONE;
    let term = ONE;
    for (let n = 1n; term !== 0n; n++) {
      term = multiply(term, x >> 16n) / n;
      sum += term;
    }
    for (let i = 0; i < 16; i++) sum = multiply(sum, sum);
    return sum;
  }

  /** The natural logarithm: each step triples the number of correct digits. */
  function ln(x) {
    let y = exactly(Math.log(toNumber(x)));
    for (let i = 0; i < 3; i++) {
      const e = exp(y);
      y += 2n * divide(x - e, x + e);
    }
    return y;
  }

  // ---- Frequencies, in radians per position: see src/tightrope/frequencies --------------------

  /** The geometric row exp(k · step). */
  function row(pairs, step) {
    const ratio = exp(step);
    const omegas = [ONE];
    while (omegas.length < pairs) omegas.push(multiply(omegas.at(-1), ratio));
    return omegas;
  }

  const step = (c) => (-2n * ln(exactly(c.base))) / BigInt(c.rotary_dim);
  const plain = (c) => row(c.rotary_dim / 2, step(c));
  const divided = (omegas, divisors) => omegas.map((omega, k) => divide(omega, exactly(divisors[k])));

  /** NTK-aware scaling: the slowest pair is divided by `scale`. */
  function stretched(c, scale) {
    const slower = c.rotary_dim > 2 ? (2n * ln(scale)) / BigInt(c.rotary_dim - 2) : 0n;
    return row(c.rotary_dim / 2, step(c) - slower);
  }

  /** Blend each frequency with the divided one; `share(omega, k)` is the share of the first, 0 to 1. */
  function blended(c, share) {
    const factor = exactly(c.factor);
    return plain(c).map((omega, k) => {
      const kept = share(omega, k);
      if (kept >= ONE) return omega;
      if (kept <= 0n) return divide(omega, factor);
      return multiply(omega, kept + divide(ONE - kept, factor));
    });
  }

  function yarn(c) {
    const dim = BigInt(c.rotary_dim);
    const logBase = ln(exactly(c.base));
    const trained = divide(exactly(c.original_max_position), TWO_PI);
    const index = (turns) => divide(dim * ln(divide(trained, exactly(turns))), 2n * logBase);
    let low = index(c.beta_fast);
    let high = index(c.beta_slow);
    if (c.truncate) {
      low = (low >> 256n) << 256n;
      high = -((-high >> 256n) << 256n);
    }
    if (low < 0n) low = 0n;
    if (high > (dim - 1n) * ONE) high = (dim - 1n) * ONE;
    if (low === high) high += ONE / 1000n;
    return blended(c, (_, k) => ONE - divide(BigInt(k) * ONE - low, high - low));
  }

  function llama3(c) {
    const low = exactly(c.low_freq_factor);
    const high = exactly(c.high_freq_factor);
    return blended(c, (omega) => {
      const turns = (BigInt(c.original_max_position) * ONE * omega) / TWO_PI;
      return turns > high ? ONE : turns < low ? 0n : divide(turns - low, high - low);
    });
  }

  function proportional(c) {
    const turning = Math.floor((c.rotary_fraction * c.rotary_dim) / 2);
    const factor = exactly(c.factor);
    return plain(c).map((omega, k) => (k < turning ? divide(omega, factor) : 0n));
  }

  const beyond = (c) => Math.max(c.length - c.original_max_position, 0);
  const growth = (c) => (exactly(c.factor) * BigInt(beyond(c))) / BigInt(c.original_max_position);

  // Each rule: its name, its class in the library, the fields that it reads, and its frequencies.
  const RULES = {
    default: ["none", null, [], plain],
    linear: ["linear", "Linear", ["factor"],
      (c) => plain(c).map((omega) => divide(omega, exactly(c.factor)))],
    ntk: ["NTK", "NTK", ["factor"], (c) => stretched(c, exactly(c.factor))],
    dynamic: ["dynamic NTK", "DynamicNTK", ["factor", "original_max_position"],
      (c) => beyond(c) ? stretched(c, ONE + growth(c)) : plain(c)],
    yarn: ["YaRN", "YaRN",
      ["factor", "original_max_position", "beta_fast", "beta_slow", "truncate"], yarn],
    llama3: ["Llama 3", "Llama3",
      ["factor", "low_freq_factor", "high_freq_factor", "original_max_position"], llama3],
    longrope: ["LongRoPE", "LongRoPE",
      ["short_factor", "long_factor", "original_max_position", "factor"],
      (c) => divided(plain(c), beyond(c) ? c.long_factor : c.short_factor)],
    proportional: ["proportional", "Proportional", ["rotary_fraction", "factor"], proportional],
  };

  // ---- Angles -----------------------------------------------------------------------------

  /** Phase words: frequencies in units of 2^-64 turn, modulo one turn. */
  const wordsOf = (omegas) =>
    omegas.map((omega) => BigInt.asIntN(64, ((omega << 65n) + TWO_PI) / (2n * TWO_PI)));

  const phaseAt = (word, position) => BigInt.asIntN(64, word * BigInt(position));

  /** [cosine, sine] of a phase, from an angle of at most an eighth of a turn. */
  function cosSin(phase) {
    const quarters = (phase + (1n << 61n)) >> 62n;
    const angle = Number(phase - (quarters << 62n)) * (toNumber(TWO_PI) / 2 ** 64);
    const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
    return [[cos, sin], [-sin, cos], [-cos, -sin], [sin, -cos]][Number(quarters & 3n)];
  }

  const bits = new Uint32Array(1);
  const asFloat = new Float32Array(bits.buffer);

  /** Round to float32 and then to bfloat16, to nearest even, as torch does. */
  function bfloat16(number) {
    asFloat[0] = number;
    bits[0] = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000;
    return asFloat[0];
  }

  // Ways to compute an angle from a frequency and a position, as in tightrope inspect.
  const f32 = Math.fround;
  const WAYS = {
    "float32 angles": (omega, position) => f32(f32(omega) * f32(position)),
    "bfloat16 frequencies": (omega, position) => f32(bfloat16(omega) * f32(position)),
    "bfloat16 positions": (omega, position) => f32(f32(omega) * bfloat16(position)),
  };

  /** The larger error of cosine and sine, both rounded to float32. */
  function error(way, omega, position, [cos, sin]) {
    const angle = WAYS[way](omega, position);
    return Math.max(Math.abs(f32(Math.cos(angle)) - cos), Math.abs(f32(Math.sin(angle)) - sin));
  }

  const LAST = 2 ** 31 - 1;
  const PER_OCTAVE = 24;

  /** For each way, the largest error of any pair at sampled positions up to each position. */
  function curves(omegas, words) {
    const positions = [...Array(31 * PER_OCTAVE + 1).keys()].map((i) => Math.floor(2 ** (i / PER_OCTAVE)));
    const sampled = [...new Set(positions.map((position) => Math.min(position, LAST)))];
    const found = Object.fromEntries(Object.keys(WAYS).map((way) => [way, []]));
    const worst = {};
    for (const position of sampled) {
      const exact = words.map((word) => cosSin(phaseAt(word, position)));
      for (const way in WAYS) {
        const errors = omegas.map((omega, k) => error(way, omega, position, exact[k]));
        worst[way] = Math.max(worst[way] ?? 0, ...errors);
        found[way].push([position, worst[way]]);
      }
    }
    return found;
  }

  /** The table of the page for checked choices: one entry per pair. */
  function pairsOf(c) {
    const before = plain(c);
    const omegas = RULES[c.rule][3](c);
    const words = wordsOf(omegas);
    return omegas.map((exact, k) => {
      const omega = toNumber(exact);
      const phase = phaseAt(words[k], c.position);
      const [cos, sin] = cosSin(phase);
      const errors = Object.keys(WAYS).map((way) => error(way, omega, c.position, [cos, sin]));
      const ratio = exact ? toNumber(divide(before[k], exact)) : Infinity;
      return {
        omega, word: words[k], phase, cos, sin, errors, ratio,
        before: toNumber(divide(TWO_PI, before[k])),
        after: exact ? toNumber(divide(TWO_PI, exact)) : Infinity,
        effect: effectOf(c, exact, before[k], ratio),
      };
    });
  }

  function effectOf(c, omega, before, ratio) {
    if (omega === before) return "kept";
    if (!omega) return "stopped";
    const blends = c.rule === "yarn" || c.rule === "llama3";
    if (blends && omega !== divide(before, exactly(c.factor))) return "blended";
    return ratio < 1 ? "faster" : "slower";
  }

  // ---- Choices: names, limits, models -------------------------------------------------------

  /** A sentence about invalid input. */
  class Invalid extends Error {}

  function real(text, least, most, open) {
    const number = text.trim() === "" ? NaN : Number(text);
    if (!(open ? number > least : number >= least) || !(number <= most)) {
      const range = `${open ? "above" : "from"} ${least} ${open ? "and at most" : "to"} ${grouped(most)}`;
      throw new Invalid(`must be a number ${range} but is “${text.slice(0, 30)}”.`);
    }
    return number;
  }

  function whole(text, least, most) {
    const digits = text.trim().replace(/[,_ ]/g, "");
    const number = digits === "" ? NaN : Number(digits);
    if (!Number.isInteger(number) || number < least || number > most) {
      const range = `from ${grouped(least)} to ${grouped(most)}`;
      throw new Invalid(`must be a whole number ${range} but is “${text.slice(0, 30)}”.`);
    }
    return number;
  }

  function even(text, least, most) {
    const number = whole(text, least, most);
    if (number % 2) throw new Invalid(`must be even but is ${number}: channels turn in pairs.`);
    return number;
  }

  /** One number for all pairs, or one for each. */
  function list(text, pairs) {
    const numbers = text.split(/[\s,]+/).filter(Boolean).map((item) => real(item, 1e-6, 1e9));
    if (numbers.length === 1 && pairs) return Array(pairs).fill(numbers[0]);
    if (numbers.length !== pairs && pairs) {
      const wanted = `one number, or ${pairs} numbers, one for each pair`;
      throw new Invalid(`must be ${wanted}, but there are ${numbers.length}.`);
    }
    return numbers;
  }

  // Each field: its label, a function that checks its text, and its value where a model has none.
  const factor = (text) => real(text, 1e-6, 1e9);
  const FIELDS = {
    base: ["Base", (text) => real(text, 1, 1e12, true), 10000],
    rotary_dim: ["Rotary dim", (text) => even(text, 2, 512), 128],
    original_max_position: ["Training length", (text) => whole(text, 1, LAST), 4096],
    length: ["Sequence length", (text) => whole(text, 1, LAST), 4096],
    position: ["Position", (text) => whole(text, 0, LAST), 1000000],
    factor: ["Factor", factor, 8],
    beta_fast: ["beta_fast", factor, 32],
    beta_slow: ["beta_slow", factor, 1],
    low_freq_factor: ["low_freq_factor", factor, 1],
    high_freq_factor: ["high_freq_factor", factor, 4],
    rotary_fraction: ["Rotary fraction", (text) => real(text, 0, 1), 0.25],
    truncate: ["truncate", (text) => text === "true", true],
    short_factor: ["short_factor", (text, c) => list(text, c.rotary_dim / 2), "1"],
    long_factor: ["long_factor", (text, c) => list(text, c.rotary_dim / 2), "4"],
  };
  const ALWAYS = ["base", "rotary_dim", "original_max_position", "length", "position"];

  // tests/repository/test_site.py compares these with the configurations of the repositories named here.
  const MODELS = {
    "Llama 3.1 8B": {
      repository: "meta-llama/Llama-3.1-8B", rule: "llama3", base: 500000,
      original_max_position: 8192, length: 131072,
    },
    "Llama 2 7B": { repository: "meta-llama/Llama-2-7b-hf" },
    "Mistral 7B v0.3": {
      repository: "mistralai/Mistral-7B-Instruct-v0.3", base: 1000000,
      original_max_position: 32768, length: 32768,
    },
    "Qwen2.5 7B with YaRN": {
      repository: "Qwen/Qwen2.5-7B-Instruct, with the YaRN of its README", rule: "yarn",
      base: 1000000, factor: 4, original_max_position: 32768, length: 131072,
    },
    "gpt-oss 20B": {
      repository: "openai/gpt-oss-20b", rule: "yarn", base: 150000, rotary_dim: 64, factor: 32,
      truncate: false, length: 131072,
    },
    "DeepSeek V3": {
      repository: "deepseek-ai/DeepSeek-V3", rule: "yarn", rotary_dim: 64, factor: 40, length: 163840,
    },
    "Gemma 3 12B, global layers": {
      repository: "google/gemma-3-12b-it", rule: "linear", base: 1000000, rotary_dim: 256,
      original_max_position: 32768, length: 131072,
    },
    "Phi-3.5 mini": {
      repository: "microsoft/Phi-3.5-mini-instruct", rule: "longrope", rotary_dim: 96, factor: 32,
      length: 131072,
      short_factor: "1 1.0199999809265137 1.0299999713897705 1.0299999713897705 1.0499999523162842 1.0499999523162842 1.0499999523162842 1.0499999523162842 1.0499999523162842 1.0699999332427979 1.0999999046325684 1.1099998950958252 1.1599998474121094 1.1599998474121094 1.1699998378753662 1.2899998426437378 1.339999794960022 1.679999828338623 1.7899998426437378 1.8199998140335083 1.8499997854232788 1.8799997568130493 1.9099997282028198 1.9399996995925903 1.9899996519088745 2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0799996852874756 2.0899996757507324 2.189999580383301 2.2199995517730713 2.5899994373321533 2.729999542236328 2.749999523162842 2.8399994373321533",
      long_factor: "1.0800000429153442 1.1100000143051147 1.1399999856948853 1.340000033378601 1.5899999141693115 1.600000023841858 1.6200000047683716 2.620000123977661 3.2300000190734863 3.2300000190734863 4.789999961853027 7.400000095367432 7.700000286102295 9.09000015258789 12.199999809265137 17.670000076293945 24.46000099182129 28.57000160217285 30.420001983642578 30.840002059936523 32.590003967285156 32.93000411987305 42.320003509521484 44.96000289916992 50.340003967285156 50.45000457763672 57.55000305175781 57.93000411987305 58.21000289916992 60.1400032043457 62.61000442504883 62.62000274658203 62.71000289916992 63.1400032043457 63.1400032043457 63.77000427246094 63.93000411987305 63.96000289916992 63.970001220703125 64.02999877929688 64.06999969482422 64.08000183105469 64.12000274658203 64.41000366210938 64.4800033569336 64.51000213623047 64.52999877929688 64.83999633789062",
    },
  };

  /** All choices of a model, as texts. */
  function choicesOf(model) {
    const texts = { model, rule: MODELS[model].rule ?? "default" };
    for (const name in FIELDS) texts[name] = String(MODELS[model][name] ?? FIELDS[name][2]);
    return texts;
  }

  const used = (rule) => [...new Set([...ALWAYS, ...RULES[rule][2]])];

  /** Check texts. Returns the values, and a sentence for each invalid field. */
  function check(texts) {
    const values = { rule: texts.rule };
    const wrong = {};
    for (const name of Object.keys(FIELDS).filter((name) => used(texts.rule).includes(name))) {
      try {
        values[name] = FIELDS[name][1](texts[name], values);
      } catch (problem) {
        if (!(problem instanceof Invalid)) throw problem;
        wrong[name] = `${FIELDS[name][0]} ${problem.message}`;
      }
    }
    for (const [low, high] of [["beta_slow", "beta_fast"], ["low_freq_factor", "high_freq_factor"]]) {
      if (values[low] > values[high]) {
        wrong[high] = `${high} must be at least ${low}, ${values[low]}, but is ${values[high]}.`;
      }
    }
    return { values, wrong };
  }

  /** The fragment of the address: the model, and the choices that differ from it. */
  function toHash(texts) {
    const usual = choicesOf(texts.model);
    const changed = Object.entries(texts).filter(
      ([name, text]) => name === "model" || text !== usual[name]);
    return `#${new URLSearchParams(changed)}`;
  }

  /** The choices in a fragment; null if it holds none, for example the anchor of a heading. */
  function fromHash(hash) {
    if (!hash.includes("=")) return null;
    const given = Object.fromEntries(new URLSearchParams(hash.slice(1)));
    const texts = choicesOf(Object.hasOwn(MODELS, given.model) ? given.model : Object.keys(MODELS)[0]);
    for (const name in FIELDS) texts[name] = given[name] ?? texts[name];
    if (Object.hasOwn(RULES, given.rule)) texts.rule = given.rule;
    return texts;
  }

  /** The same rotation in Python. */
  function python(c) {
    const [, kind, fields] = RULES[c.rule];
    const literal = (value) =>
      Array.isArray(value)
        ? new Set(value).size === 1 ? `(${value[0]},) * ${value.length}` : `(${value.join(", ")})`
        : value === true ? "True" : value === false ? "False" : String(value);
    const rule = fields.map((name) => `${name}=${literal(c[name])}`).join(", ");
    return [
      "from tightrope import RopeSpec, frequencies", "",
      ...(kind ? [`rule = frequencies.${kind}(${rule})`] : []),
      `spec = RopeSpec(${c.rotary_dim}, base=${c.base}${kind ? ", scaling=rule" : ""})`,
      `inv_freq = spec.frequencies(seq_len=${c.length}).inv_freq`,
    ].join("\n");
  }

  // For tests, and for the console of a curious reader.
  globalThis.explore = { FIELDS, MODELS, RULES, WAYS, check, choicesOf, curves, pairsOf, python, wordsOf };

  // ---- The page ---------------------------------------------------------------------------

  const grouped = (number) => number.toLocaleString("en-US");

  function made(element, attributes, ...children) {
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    element.append(...children);
    return element;
  }
  const html = (name, attributes, ...children) =>
    made(document.createElement(name), attributes, ...children);
  const svg = (name, attributes, ...children) =>
    made(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, ...children);

  /** A wavelength: whole numbers with separators from 1000 on. */
  function length(number) {
    if (number === Infinity) return "∞";
    return number < 1000 ? String(+number.toPrecision(4)) : grouped(Math.round(number));
  }

  const small = (number) => (number < 0.01 ? number.toExponential(1) : number.toPrecision(2));

  /** A table that scrolls in its own frame. `heads` and `rows` hold texts. */
  function table(caption, heads, rows) {
    const cells = (texts, scope) => html("tr", {}, ...texts.map((text, column) =>
      column && scope === "row" ? html("td", {}, text) : html("th", { scope }, text)));
    return html("div", { class: "explore-scroll", tabindex: 0, role: "region", "aria-label": caption },
      html("table", { class: "explore-table" }, html("thead", {}, cells(heads, "col")),
        html("tbody", {}, ...rows.map((texts) => cells(texts, "row")))));
  }

  const SHAPES = {
    kept: "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0",
    blended: "M0,-4.5L4.5,0L0,4.5L-4.5,0Z",
    slower: "M-3,-3H3V3H-3Z",
    faster: "M0,-4L4,3H-4Z",
    stopped: "M-3,-3L3,3M-3,3L3,-3",
    before: "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0",
  };
  const marker = (kind, x, y) =>
    svg("path", { d: SHAPES[kind], class: `explore-${kind}`, transform: `translate(${x},${y})` });

  /** A picture with empty axes, and its scales. `x` and `y` have a title, ends, and ticks [place, text]. */
  function axes(width, label, x, y) {
    const [left, right, top, bottom, height] = [56, 12, 12, 46, 320];
    const scale = (from, to, [low, high]) => (value) => from + ((value - low) / (high - low)) * (to - from);
    const atX = scale(left, width - right, x.ends);
    const atY = scale(height - bottom, top, y.ends);
    const middle = { "text-anchor": "middle" };
    const text = (words, px, py, more) => svg("text", { x: px, y: py, ...more }, words);
    const picture = svg("svg",
      { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      ...y.ticks.flatMap(([place, words]) => [
        svg("line", { x1: left, x2: width - right, y1: atY(place), y2: atY(place), class: "explore-grid" }),
        text(words, left - 6, atY(place) + 4, { "text-anchor": "end" }),
      ]),
      ...x.ticks.map(([place, words]) => text(words, atX(place), height - bottom + 18, middle)),
      text(x.title, (left + width - right) / 2, height - 6, middle),
      text(y.title, 0, 0,
        { ...middle, transform: `translate(12,${(top + height - bottom) / 2}) rotate(-90)` }));
    return { picture, atX, atY, ends: [left, width - right, top, height - bottom] };
  }

  /** A dashed line across the picture, with a text at one end: "start" or "end". */
  function across({ picture, atY, ends }, value, words, end) {
    const x = end === "start" ? ends[0] + 6 : ends[1] - 6;
    picture.append(
      svg("line", { x1: ends[0], x2: ends[1], y1: atY(value), y2: atY(value), class: "explore-mark" }),
      svg("text", { x, y: atY(value) - 5, "text-anchor": end }, words));
  }

  const powers = (low, high, every) =>
    [...Array(high - low + 1).keys()].map((i) => low + i).filter((power) => power % every === 0);
  const raised = (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit] ?? "⁻";
  const tenTo = (power) => `10${[...String(power)].map(raised).join("")}`;
  const tens = (low, high, every) => powers(low, high, every).map((power) => [power, tenTo(power)]);

  function wavelengths(width, c, pairs) {
    const all = pairs.flatMap((pair) => [pair.before, pair.after]).filter(Number.isFinite);
    const low = Math.floor(Math.log10(Math.min(...all)));
    const high = Math.ceil(Math.log10(Math.max(...all, c.length, c.original_max_position)));
    const last = Math.max(pairs.length - 1, 1);
    const every = Math.max(Math.ceil(last / 8 / 4) * 4, 1);
    const chart = axes(width, "Wavelength of each pair before and after scaling",
      { title: "pair", ends: [-0.5, last + 0.5], ticks: powers(0, last, every).map((k) => [k, k]) },
      { title: "positions per turn", ends: [low, high], ticks: tens(low, high, high - low > 9 ? 2 : 1) });
    across(chart, Math.log10(c.original_max_position), "training length", "start");
    if (c.length !== c.original_max_position) across(chart, Math.log10(c.length), "sequence length", "start");
    pairs.forEach((pair, k) => {
      const [x, before] = [chart.atX(k), chart.atY(Math.log10(pair.before))];
      const after = pair.after === Infinity ? chart.ends[2] : chart.atY(Math.log10(pair.after));
      if (pair.effect !== "kept") {
        chart.picture.append(
          svg("line", { x1: x, x2: x, y1: before, y2: after, class: "explore-grid" }),
          marker("before", x, before));
      }
      chart.picture.append(marker(pair.effect, x, after));
    });
    return chart.picture;
  }

  function errorCurves(width, c, found) {
    const chart = axes(width, "Largest error of a cosine or sine up to each position",
      { title: "position", ends: [0, Math.log10(LAST)], ticks: tens(0, 9, 1) },
      { title: "largest error", ends: [-8, 0.5], ticks: tens(-8, 0, 2) });
    across(chart, Math.log10(1.2e-7), "phase words: guaranteed", "end");
    across(chart, -9 * Math.log10(2), "rounding to bfloat16", "end");
    const x = chart.atX(Math.log10(Math.max(c.position, 1)));
    const [top, bottom] = chart.ends.slice(2);
    chart.picture.append(svg("line", { x1: x, x2: x, y1: top, y2: bottom, class: "explore-mark" }));
    Object.values(found).forEach((points, way) => {
      const places = points.map(([position, error]) => {
        const y = Math.log10(Math.max(error, 1e-8));
        return `${chart.atX(Math.log10(position)).toFixed(1)},${chart.atY(y).toFixed(1)}`;
      });
      const line = { points: places.join(" "), class: `explore-way explore-way-${way}` };
      chart.picture.append(svg("polyline", line));
    });
    return chart.picture;
  }

  /** Names of markers or lines, each with a sample of it. */
  function legend(entries) {
    const small = { width: 24, height: 12, viewBox: "-12 -6 24 12", "aria-hidden": "true" };
    return html("ul", { class: "explore-legend" },
      ...entries.map(([sample, words]) => html("li", {}, svg("svg", small, sample), ` ${words}`)));
  }

  function effect(pair) {
    if (pair.effect === "kept" || pair.effect === "stopped") return pair.effect;
    const factor = +Math.max(pair.ratio, 1 / pair.ratio).toPrecision(4);
    return `${pair.effect === "blended" ? "blended, " : ""}${pair.ratio < 1 ? "×" : "÷"} ${factor}`;
  }

  const EFFECTS = ["kept", "blended", "slower", "faster", "stopped"];

  /** Sentences about the scaling. */
  function summary(c, pairs) {
    const count = (kind) => pairs.filter((pair) => pair.effect === kind).length;
    const kinds = EFFECTS.filter(count);
    const counts = kinds.map((kind) => `${count(kind)} ${count(kind) > 1 ? "are" : "is"} ${kind}`);
    const first = kinds.length > 1 ? `Of ${pairs.length} pairs ${counts.join(", ")}.` : `All pairs are ${kinds[0]}.`;
    const never = pairs.filter((pair) => pair.before > c.original_max_position).length;
    return `${first} Without scaling, ${never} of ${pairs.length} do not complete a turn within the ` +
      `training length of ${grouped(c.original_max_position)}.`;
  }

  function start(host) {
    let texts = fromHash(location.hash) ?? choicesOf(Object.keys(MODELS)[0]);
    const at = (name) => document.getElementById(`explore-${name}`);
    const inputs = {};
    const labelled = (name, label, input) => {
      inputs[name] = input;
      input.addEventListener("input", () =>
        change(name, input.type === "checkbox" ? String(input.checked) : input.value));
      return html("p", { id: `explore-field-${name}` },
        html("label", { for: `explore-input-${name}` }, label), input,
        html("span", { id: `explore-wrong-${name}`, class: "explore-wrong", role: "alert" }));
    };
    const select = (name, label, options) => labelled(name, label,
      html("select", { id: `explore-input-${name}` },
        ...options.map(([value, words]) => html("option", { value }, words))));
    host.replaceChildren(
      select("model", "Start from the model", Object.keys(MODELS).map((name) => [name, name])),
      select("rule", "Frequency rule", Object.entries(RULES).map(([name, [words]]) => [name, words])),
      ...Object.keys(FIELDS).map((name) => {
        const id = { id: `explore-input-${name}`, "aria-describedby": `explore-wrong-${name}` };
        const text = { autocomplete: "off", spellcheck: "false" };
        const input = name === "truncate" ? html("input", { ...id, type: "checkbox" })
          : name.endsWith("_factor") && !name.includes("freq") ? html("textarea", { ...id, ...text, rows: 2 })
          : html("input", { ...id, ...text, type: "text" });
        return labelled(name, FIELDS[name][0], input);
      }));
    host.addEventListener("submit", (event) => event.preventDefault());

    let drawn = null; // the choices and results on the page
    let curvesFor = "";
    let found = null;

    function change(name, value) {
      texts = name === "model" ? choicesOf(value) : { ...texts, [name]: value };
      history.replaceState(null, "", toHash(texts));
      show();
    }

    function show() {
      const { values: c, wrong } = check(texts);
      const visible = ["model", "rule", ...used(texts.rule)];
      for (const name in inputs) {
        const input = inputs[name];
        at(`field-${name}`).hidden = !visible.includes(name);
        if (input.type === "checkbox") input.checked = texts[name] === "true";
        else if (input.value !== texts[name]) input.value = texts[name];
        if (name in FIELDS) {
          input.setAttribute("aria-invalid", String(name in wrong));
          at(`wrong-${name}`).textContent = wrong[name] ?? "";
        }
      }
      const stale = Object.keys(wrong).length > 0;
      for (const part of document.querySelectorAll(".explore-result")) {
        part.classList.toggle("explore-stale", stale);
      }
      at("link").href = toHash(texts);
      at("state").textContent = !stale ? ""
        : drawn ? "The results below are those of the last valid choices."
        : "There are no results until all choices are valid.";
      if (stale) return;
      const pairs = pairsOf(c);
      const rotation = python(c);
      if (rotation !== curvesFor) {
        found = curves(pairs.map((pair) => pair.omega), pairs.map((pair) => pair.word));
      }
      curvesFor = rotation;
      drawn = { c, pairs };
      at("summary").textContent = summary(c, pairs);
      at("python").textContent = rotation;
      const ways = Object.keys(WAYS);
      const kinds = EFFECTS.filter((kind) => pairs.some((pair) => pair.effect === kind));
      const samples = kinds.map((kind) => [marker(kind, 0, 0), kind]);
      if (kinds.join() !== "kept") samples.unshift([marker("before", 0, 0), "before scaling"]);
      at("wavelengths-table").replaceChildren(
        legend(samples),
        table("Wavelengths of all pairs",
          ["pair", "unscaled", "scaled", "scaling", "turns in the sequence"],
          pairs.map((pair, k) => [
            k, length(pair.before), length(pair.after), effect(pair), length(c.length / pair.after),
          ])));
      at("angles").replaceChildren(table(`Angles at position ${grouped(c.position)}`,
        ["pair", "phase word of the frequency", "angle, turns", "cosine", "sine",
          ...ways.map((way) => `error, ${way}`)],
        pairs.map((pair, k) => [
          k, pair.word, (Number(pair.phase) / 2 ** 64).toFixed(12),
          pair.cos.toFixed(12), pair.sin.toFixed(12), ...pair.errors.map(small),
        ])));
      const worst = ways.map(
        (way, index) => `${small(Math.max(...pairs.map((pair) => pair.errors[index])))} with ${way}`);
      at("position").textContent = `At position ${grouped(c.position)} the largest error of a cosine ` +
        `or sine is ${worst.join(", ")}.`;
      at("errors-legend").replaceChildren(legend(ways.map((way, index) =>
        [svg("line", { x1: -12, x2: 12, class: `explore-way explore-way-${index}` }), way])));
      draw();
    }

    function draw() {
      if (!drawn) return;
      const width = Math.max(at("errors").clientWidth, 240);
      at("wavelengths").replaceChildren(wavelengths(width, drawn.c, drawn.pairs));
      at("errors").replaceChildren(errorCurves(width, drawn.c, found));
    }

    addEventListener("resize", draw);
    addEventListener("hashchange", () => {
      texts = fromHash(location.hash) ?? texts;
      show();
    });
    show();
  }

  const host = document.getElementById("explore-form");
  if (host) start(host);
})();
