"use strict";
(async () => {
  const $ = id => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const LAYERS = data.layers.length, HEADS = data.heads, PROMPT = data.prompt.ids.length;
  const HUB = 2, DISCOUNTED = 4, PROTECTED = 1;
  const UNWRITTEN = 6; // the shade of what is not in the cache yet; 0 to 5 grow with the share of heads
  const whole = n => n.toLocaleString("en");
  const percent = x => `${(100 * x).toFixed(0)} %`;

  // Unpacking

  async function bytes(text) {
    const raw = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  async function planes(text) {
    const both = await bytes(text), size = both.length / 2, numbers = new Uint16Array(size);
    for (let i = 0; i < size; i++) numbers[i] = both[i] * 256 + both[size + i];
    return numbers;
  }
  // Places and, in falling order, values (bfloat16) of the candidates, head after head.
  async function ranked(packed) {
    if (!packed) return null;
    const codes = await planes(packed.ordered);
    return { places: await planes(packed.places), ordered: new Float32Array(Uint32Array.from(codes, code => code << 16).buffer) };
  }

  class Run {
    static async unpack(packed) {
      const run = Object.assign(new Run(), packed);
      run.ids = data.prompt.ids.concat(packed.ids);
      run.pieces = data.prompt.pieces.concat(packed.pieces);
      run.size = run.ids.length;
      run.passes = packed.nbytes.length;
      run.left = await planes(packed.left);
      run.steps = packed.evictions.map(eviction => eviction.step);
      run.evictions = await Promise.all(packed.evictions.map(async eviction => ({
        step: eviction.step,
        scores: await ranked(eviction.scores),
        refined: await ranked(eviction.refined),
        cosines: await bytes(eviction.cosines),
        flags: await bytes(eviction.flags),
      })));
      run.locate();
      run.memory = {};
      return run;
    }
    // For each eviction, the positions of the entries before it, head after head; where each head's start; and by entry,
    // how many that compete stand before it, which is where places and values are found.
    locate() {
      let before = null;
      this.evictions.forEach((eviction, index) => {
        const until = Math.min(PROMPT + eviction.step, this.size);
        const where = new Uint32Array(eviction.flags.length), starts = new Uint32Array(LAYERS * HEADS + 1);
        let at = 0;
        for (let head = 0; head < LAYERS * HEADS; head++) {
          starts[head] = at;
          const base = head * this.size;
          if (before) {
            for (let j = before.starts[head]; j < before.starts[head + 1]; j++) {
              if (this.left[base + before.where[j]] >= index) where[at++] = before.where[j];
            }
          }
          for (let p = before ? before.until : 0; p < until; p++) where[at++] = p;
        }
        starts[LAYERS * HEADS] = at;
        const rank = new Uint32Array(at + 1);
        for (let j = 0; j < at; j++) rank[j + 1] = rank[j] + (eviction.flags[j] & PROTECTED ? 0 : 1);
        before = Object.assign(eviction, { where, starts, until, rank });
      });
    }
    entered(p) { return Math.max(0, p - PROMPT + 1); }
    step(time) { return Math.min(Math.max(time - 1, 0), this.passes - 1); }
    done(time) {
      const step = this.step(time);
      return time ? this.steps.filter(s => s <= step).length : 0;
    }
    // Tokens of which the cache has seen the entry at that time.
    seen(time) { return Math.min(PROMPT + this.step(time), this.size); }
    // What was worked out is kept, by name and key, since sliders go back and forth.
    once(name, key, make) {
      const known = (this.memory[name] ??= new Map());
      if (known.size > 64) known.clear();
      if (!known.has(key)) known.set(key, make());
      return known.get(key);
    }
    // By token, how many of `heads` hold it after `done` evictions, and how many lost it in the last of them.
    counts(heads, done) {
      const held = new Uint16Array(this.size), lost = new Uint16Array(this.size);
      for (const head of heads) {
        const base = head * this.size;
        for (let p = 0; p < this.size; p++) {
          const left = this.left[base + p];
          if (left >= done) held[p]++;
          else if (left === done - 1) lost[p]++;
        }
      }
      return { held, lost };
    }
    // By token, in how many of `heads` it was scored, a hub, discounted: at the eviction that took it, or the last one.
    marks(heads, done) {
      const scored = new Uint16Array(this.size), hubs = new Uint16Array(this.size), discounted = new Uint16Array(this.size);
      const last = Math.max(done - 1, 0);
      this.evictions.slice(0, last + 1).forEach((eviction, index) => {
        for (const head of heads) {
          const base = head * this.size;
          for (let j = eviction.starts[head]; j < eviction.starts[head + 1]; j++) {
            const p = eviction.where[j];
            if (index < last && this.left[base + p] > index) continue;
            const flags = eviction.flags[j];
            scored[p]++;
            if (flags & HUB) hubs[p]++;
            if (flags & DISCOUNTED) discounted[p]++;
          }
        }
      });
      return { scored, hubs, discounted };
    }
    // The first token that has come since eviction `done - 1`: from there on every head holds everything.
    since(done) { return done ? this.evictions[done - 1].until : Math.min(PROMPT, this.size); }
    // Entries of each head.
    lengths(done, seen) {
      const since = this.since(done);
      return this.once("lengths", done, () => {
        const found = new Uint32Array(LAYERS * HEADS);
        for (let head = 0; head < found.length; head++) {
          const base = head * this.size;
          for (let p = 0; p < since; p++) if (this.left[base + p] >= done) found[head]++;
        }
        return found;
      }).map(entries => entries + seen - since);
    }
    // How a head valued a token at the eviction that took it, or the last one; null if none has yet.
    valued(head, p, done) {
      const index = Math.min(this.left[head * this.size + p], Math.max(done - 1, 0));
      const eviction = this.evictions[index];
      if (!eviction || this.entered(p) > eviction.step) return null;
      let low = eviction.starts[head], high = eviction.starts[head + 1] - 1;
      const first = eviction.rank[low], rivals = eviction.rank[high + 1] - first;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (eviction.where[middle] < p) low = middle + 1; else high = middle;
      }
      const flags = eviction.flags[low], at = eviction.rank[low];
      const read = list => list && { place: list.places[at], value: list.ordered[first + list.places[at]] };
      return {
        eviction, rivals, flags, cosine: (eviction.cosines[low] - 127) / 127,
        score: flags & PROTECTED ? null : read(eviction.scores), refined: flags & PROTECTED ? null : read(eviction.refined),
      };
    }
  }

  const runs = await Promise.all(data.runs.map(Run.unpack));
  const latest = Math.max(...runs.map(run => run.passes));

  // How many first tokens two runs share: after these their texts part.
  function common(a, b) {
    let p = 0;
    while (p < a.size && p < b.size && a.ids[p] === b.ids[p]) p++;
    return p;
  }

  // Controls

  const narrow = matchMedia("(max-width: 40rem)").matches;
  const state = { time: 0, layer: -1, head: -1, against: runs.length > 1 ? 0 : -1, show: -1, marks: 3, token: 0, pinned: false };
  function choices(id, name, items, value) {
    for (const [number, text] of items) $(id).append(new Option(text, number, false, number === value));
    state[name] = value;
    $(id).addEventListener("change", () => { state[name] = Number($(id).value); paint(); });
  }
  const policies = runs.map((run, i) => [i, run.policy]);
  choices("layer", "layer", [[-1, "all"], ...data.layers.map((layer, i) => [i, String(layer)])], -1);
  choices("head", "head", [[-1, "all"], ...Array.from({ length: HEADS }, (_, i) => [i, String(i)])], -1);
  choices("against", "against", [[-1, "nothing"], ...policies], state.against);
  choices("show", "show", [[-1, "all policies"], ...policies], narrow && runs.length > 1 ? 1 : -1);
  choices("marks", "marks", [], 3);
  for (const id of ["against-label", "show-label"]) $(id).hidden = runs.length < 2;
  $("time").max = latest;

  const heads = () => {
    const found = [];
    for (let layer = 0; layer < LAYERS; layer++) {
      if (state.layer >= 0 && layer !== state.layer) continue;
      for (let head = 0; head < HEADS; head++) if (state.head < 0 || head === state.head) found.push(layer * HEADS + head);
    }
    return found;
  };
  const shown = () => runs.filter((_, i) => state.show < 0 || i === state.show);

  // The text: one block for some lines of it, so that what is off the screen is neither laid out nor painted

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }
  const visible = piece => (piece === "" ? "·" : piece.replaceAll("\n", "↵\n"));
  for (const [number, run] of runs.entries()) {
    run.spans = run.pieces.map(piece => element("span", { textContent: visible(piece), tabIndex: -1 }));
    run.codes = new Int16Array(run.size).fill(-1);
    run.section = element("section", { className: "run text" });
    run.section.setAttribute("aria-label", `The text under ${run.policy}; arrow keys go from token to token`);
    let chunk = null, row = 0;
    run.spans.forEach((span, p) => {
      const filled = chunk ? chunk.childElementCount : Infinity;
      const paragraph = p && run.pieces[p - 1].endsWith("\n");
      if (p === PROMPT || filled >= 400 || (filled >= 48 && paragraph)) {
        chunk = element("div", { className: p < PROMPT ? "chunk" : "chunk written" });
        chunk.style.gridRow = ++row;
        run.section.append(chunk);
      }
      span.dataset.p = p;
      chunk.append(span);
    });
    run.section.dataset.run = number;
    run.section.dataset.policy = run.policy;
    run.title = element("div", {}, element("h2", { textContent: run.policy }), run.summary = element("p"));
    run.figure = element("figure", {}, run.caption = element("figcaption"), run.grid = element("div", { className: "heads" }));
    run.told = element("div");
    bars(run);
    $("texts").append(run.section);
    $("names").append(run.title);
    $("budgets").append(run.figure);
  }

  // Entries per head: one row for each head, one bar for each layer; a bar chooses its layer and head

  function bars(run) {
    run.grid.style.gridTemplateColumns = `max-content repeat(${LAYERS}, minmax(4px, 1fr))`;
    run.grid.setAttribute("role", "group");
    run.grid.setAttribute("aria-label", `Entries per head under ${run.policy}; arrow keys go from bar to bar, Enter chooses`);
    run.bars = [];
    for (let head = 0; head < HEADS; head++) {
      run.grid.append(element("span", { textContent: `head ${head}` }));
      for (let layer = 0; layer < LAYERS; layer++) {
        const bar = element("button", { type: "button", tabIndex: layer || head ? -1 : 0 }, element("i"));
        bar.addEventListener("click", () => {
          const again = state.layer === layer && state.head === head;
          $("layer").value = state.layer = again ? -1 : layer;
          $("head").value = state.head = again ? -1 : head;
          paint();
        });
        run.bars[layer * HEADS + head] = bar;
        run.grid.append(bar);
      }
    }
    run.grid.addEventListener("keydown", event => {
      const at = run.bars.indexOf(document.activeElement), [layer, head] = [Math.floor(at / HEADS), at % HEADS];
      const to = { ArrowLeft: [layer - 1, head], ArrowRight: [layer + 1, head], ArrowUp: [layer, head - 1], ArrowDown: [layer, head + 1] }[event.key];
      if (at < 0 || !to) return;
      event.preventDefault();
      if (to[0] < 0 || to[0] >= LAYERS || to[1] < 0 || to[1] >= HEADS) return;
      run.bars[at].tabIndex = -1;
      const next = run.bars[to[0] * HEADS + to[1]];
      next.tabIndex = 0;
      next.focus();
    });
  }

  function paintBars(run, chosen, most) {
    const least = Math.min(...run.lengthsNow), largest = Math.max(...run.lengthsNow);
    run.caption.textContent = `Entries per head: ${least === largest ? whole(least) : `${whole(least)} to ${whole(largest)}`}; ` +
      `one bar a layer, ${data.layers[0]} to ${data.layers[LAYERS - 1]}; full height is ${whole(most)}`;
    run.bars.forEach((bar, head) => {
      const entries = run.lengthsNow[head];
      const label = `layer ${data.layers[Math.floor(head / HEADS)]}, head ${head % HEADS}: ${whole(entries)} entries`;
      if (bar.title !== label) {
        bar.title = label;
        bar.setAttribute("aria-label", label);
      }
      bar.firstChild.style.height = `${100 * entries / (most || 1)}%`;
      bar.classList.toggle("chosen", chosen.has(head));
      bar.setAttribute("aria-pressed", chosen.size < LAYERS * HEADS && chosen.has(head));
    });
  }

  // Painting: the classes of those tokens that have changed

  // 0 for no head, 5 for all, and between them up to a tenth, a quarter, half, and more.
  function shade(held, among) {
    if (!held || held === among) return held ? 5 : 0;
    return 10 * held <= among ? 1 : 4 * held <= among ? 2 : 2 * held <= among ? 3 : 4;
  }

  const names = [];
  function classes(code) {
    if (names[code] === undefined) {
      const [shade, difference, mark, gone] = [code & 7, (code >> 3) & 3, (code >> 5) & 3, code >> 7];
      names[code] = [`k${shade}`, ["", "more", "less"][difference], ["", "hub", "disc"][mark], gone ? "gone" : ""].filter(Boolean).join(" ");
    }
    return names[code];
  }

  let painted = null;
  function arrange(now) {
    painted = state.show;
    document.body.style.setProperty("--shown", now.length);
    for (const run of runs) {
      for (const part of [run.section, run.title, run.figure]) part.style.display = now.includes(run) ? "" : "none";
      for (const chunk of run.section.children) chunk.style.gridColumn = now.indexOf(run) + 1;
    }
  }

  function paint() {
    const chosen = heads(), among = chosen.length, key = `${state.layer} ${state.head}`, now = shown();
    const other = runs[state.against];
    const counted = run => run.once("counts", `${key} ${run.done(state.time)}`, () => run.counts(chosen, run.done(state.time)));
    if (painted !== state.show) arrange(now);
    for (const run of runs) {
      run.lengthsNow = run.lengths(run.done(state.time), run.seen(state.time));
    }
    const most = Math.max(...now.map(run => Math.max(...run.lengthsNow)));
    now.forEach(run => {
      const done = run.done(state.time), seen = run.seen(state.time), { held, lost } = counted(run);
      const { scored, hubs, discounted } = run.once("marks", `${key} ${done}`, () => run.marks(chosen, done));
      const comparing = other && other !== run;
      const shared = comparing ? Math.min(run.once(`common ${state.against}`, 0, () => common(run, other)), seen, other.seen(state.time)) : 0;
      const theirs = comparing ? counted(other).held : null, clear = Math.ceil(among / 10);
      const fresh = state.time > 0 && run.steps[done - 1] === state.time - 1;
      for (let p = 0; p < run.size; p++) {
        let code = UNWRITTEN;
        if (p < seen) {
          code = shade(held[p], among);
          if (p < shared) code |= held[p] - theirs[p] >= clear ? 1 << 3 : theirs[p] - held[p] >= clear ? 2 << 3 : 0;
          if (scored[p] && state.marks & 1 && 2 * hubs[p] >= scored[p]) code |= 1 << 5;
          else if (scored[p] && state.marks & 2 && 2 * discounted[p] >= scored[p]) code |= 2 << 5;
          if (fresh && lost[p] && lost[p] >= held[p]) code |= 1 << 7;
        }
        if (code !== run.codes[p]) {
          run.codes[p] = code;
          run.spans[p].className = classes(code);
        }
      }
      const total = run.lengthsNow.reduce((sum, n) => sum + n, 0) / run.lengthsNow.length;
      const notes = [`${total.toLocaleString("en", { maximumFractionDigits: 1 })} entries per head`];
      if (state.time) notes.push(`${(run.nbytes[run.step(state.time)] / 2 ** 20).toFixed(1)} MiB`);
      if (comparing) notes.push(overlap(run, other, chosen, shared));
      run.summary.textContent = notes.join(" · ");
      paintBars(run, new Set(chosen), most);
    });
    const ended = now.some(run => run.steps.includes(state.time - 1) && state.time);
    const text = state.time === 0 ? `${whole(PROMPT)} tokens read, nothing evicted yet`
      : `After pass ${whole(state.time)} of ${whole(latest)}: ${whole(PROMPT)} tokens read, ${whole(state.time - 1)} written${ended ? "; an eviction has ended this pass" : ""}`;
    $("now").textContent = text;
    $("time").value = state.time;
    $("time").setAttribute("aria-valuetext", text);
    $("back").disabled = !stops().some(stop => stop < state.time);
    $("forward").disabled = !stops().some(stop => stop > state.time);
    $("token").max = Math.max(...now.map(run => run.size)) - 1;
    tell(false);
  }

  function overlap(run, other, chosen, shared) {
    const [mine, theirs] = [run.done(state.time), other.done(state.time)];
    const count = (start, stop) => {
      const found = { both: 0, own: 0 };
      for (const head of chosen) {
        for (let p = start; p < stop; p++) {
          if (run.left[head * run.size + p] < mine) continue;
          found.own++;
          if (other.left[head * other.size + p] >= theirs) found.both++;
        }
      }
      return found;
    };
    const old = Math.min(shared, run.since(mine), other.since(theirs));
    const before = run.once("overlap", [state.layer, state.head, state.against, mine, theirs, old].join(), () => count(0, old));
    const after = count(old, shared), own = before.own + after.own;
    const parted = shared < Math.min(run.seen(state.time), other.seen(state.time)) ? ", up to where the texts part" : "";
    return own ? `${percent((before.both + after.both) / own)} of them also kept by ${other.policy}${parted}` : "";
  }

  // One token in words

  const number = x => Number(x.toPrecision(3)).toString();
  const when = step => (step ? `after ${whole(step)} written token${step > 1 ? "s" : ""}` : "after the prompt");
  const quoted = piece => (piece === "" ? "(a part of the next character)" : `“${piece.replaceAll("\n", "↵")}”`);

  function describe(run, p) {
    if (p >= run.size) return ["no such token: the text is shorter"];
    const chosen = heads(), done = run.done(state.time), seen = run.seen(state.time);
    if (p >= seen) {
      return [p === run.size - 1 && state.time >= run.passes ? "the last token written: it never enters the cache" : "not in the cache yet"];
    }
    const values = chosen.map(head => run.valued(head, p, done)).filter(Boolean);
    const scored = values.filter(value => value.score);
    const lines = [];
    if (chosen.length === 1) {
      const left = run.left[chosen[0] * run.size + p];
      lines.push(left < done ? `evicted ${when(run.steps[left])}` : "held");
      const [value] = values;
      if (!value) return [...lines, "not scored yet"];
      const place = found => `${number(found.value)} (place ${whole(found.place + 1)} of ${whole(value.rivals)})`;
      const kind = value.flags & DISCOUNTED ? ", a discounted neighbour" : value.flags & HUB ? ", a hub" : "";
      if (value.score) lines.push(`score ${when(value.eviction.step)} ${place(value.score)}${kind}`);
      else lines.push(`protected ${when(value.eviction.step)}, whatever its score`);
      if (value.refined) lines.push(`refined to ${place(value.refined)}`);
      lines.push(`cosine to the most alike entry kept ${value.cosine.toFixed(2)}`);
      return lines;
    }
    const held = chosen.filter(head => run.left[head * run.size + p] >= done).length;
    lines.push(`held by ${held} of ${chosen.length} heads`);
    if (!values.length) return [...lines, "not scored yet"];
    const mean = list => list.reduce((sum, x) => sum + x, 0) / list.length;
    const count = flag => values.filter(value => value.flags & flag).length;
    if (scored.length) {
      const above = mean(scored.map(value => (value.rivals > 1 ? 1 - value.score.place / (value.rivals - 1) : 1)));
      lines.push(`scored at least as high as ${percent(above)} of a head's other candidates, on average`);
    }
    const roles = [[HUB, "hub"], [DISCOUNTED, "discounted"], [PROTECTED, "protected"]]
      .filter(([flag]) => count(flag)).map(([flag, name]) => `${name} in ${count(flag)}`);
    if (roles.length) lines.push(`${roles.join(", ")} of ${values.length} heads`);
    const cosines = values.map(value => value.cosine);
    lines.push(`cosine to the most alike entry kept ${mean(cosines).toFixed(2)} on average (${Math.min(...cosines).toFixed(2)} to ${Math.max(...cosines).toFixed(2)})`);
    return lines;
  }

  let marked = [];
  function tell(aloud) {
    const p = state.token, now = shown(), owner = now.find(run => p < run.size) ?? now[0];
    const words = now.map(run => run.pieces[p] ?? ""), same = words.every(word => word === words[0]);
    const place = p < PROMPT ? "read" : `written (number ${whole(p - PROMPT + 1)})`;
    const line = `Token ${whole(p)}${same ? ` ${quoted(owner.pieces[p])}` : ""}, ${place}${state.pinned ? " · held on to (Escape lets go)" : ""}`;
    const spoken = [line];
    $("details").replaceChildren(element("p", { className: "whole" }, element("b", { textContent: line })));
    now.forEach((run, i) => {
      const lines = describe(run, p);
      lines[0] = `${now.length > 1 ? `${run.policy}${same ? "" : ` ${quoted(words[i])}`}: ` : ""}${lines[0]}`;
      $("details").append(element("div", {}, ...lines.map(text => element("p", { textContent: text }))));
      spoken.push(lines.join("; "));
    });
    for (const span of marked) {
      span.classList.remove("at");
      span.removeAttribute("aria-current");
    }
    marked = now.map(run => run.spans[p]).filter(Boolean);
    for (const span of marked) {
      span.classList.add("at");
      span.setAttribute("aria-current", "true");
    }
    for (const run of now) {
      const done = run.done(state.time), seen = run.seen(state.time);
      run.bars.forEach((bar, head) => bar.classList.toggle("holds", p < seen && run.left[head * run.size + p] >= done));
      run.spans[run.tabbed ?? 0].tabIndex = -1;
      run.tabbed = Math.min(p, run.size - 1);
      run.spans[run.tabbed].tabIndex = 0;
    }
    $("token").value = p;
    if (aloud) $("say").textContent = spoken.join(". ");
  }

  // Time

  const stops = () => [...new Set([0, ...shown().flatMap(run => run.steps.map(step => step + 1)), latest])].sort((a, b) => a - b);
  let playing = null;
  function play(on) {
    clearInterval(playing);
    playing = on ? setInterval(() => (state.time < latest ? go(state.time + 1) : play(false)), 120) : null;
    $("play").textContent = on ? "Pause" : "Play";
  }
  let due = false;
  function go(time) {
    state.time = time;
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      paint();
    });
  }
  $("time").addEventListener("input", () => {
    play(false);
    go(Number($("time").value));
  });
  $("back").addEventListener("click", () => go(stops().findLast(stop => stop < state.time) ?? 0));
  $("forward").addEventListener("click", () => go(stops().find(stop => stop > state.time) ?? latest));
  $("play").addEventListener("click", () => {
    if (!playing && state.time >= latest) go(0);
    play(!playing);
  });

  // Tokens: pointing, clicking, arrow keys, and the number field for those who cannot point

  const texts = $("texts");
  const tokenOf = event => (event.target instanceof Element ? event.target.closest("span[data-p]") : null);
  const point = (p, aloud) => {
    state.token = p;
    tell(aloud);
  };
  texts.addEventListener("pointerover", event => {
    const span = tokenOf(event);
    if (span && !state.pinned && Number(span.dataset.p) !== state.token) point(Number(span.dataset.p), false);
  });
  texts.addEventListener("click", event => {
    const span = tokenOf(event);
    if (!span) return;
    const p = Number(span.dataset.p);
    state.pinned = !(state.pinned && p === state.token);
    point(p, true);
    span.focus({ preventScroll: true });
  });
  texts.addEventListener("focusin", event => {
    const span = tokenOf(event);
    if (span && span.matches(":focus-visible")) point(Number(span.dataset.p), true);
  });
  // The token of the line above (-1) or below (1) that stands nearest.
  function vertical(run, p, direction) {
    const from = run.spans[p].getClientRects()[0];
    let best = p, distance = Infinity, line = null;
    for (let q = p + direction; q >= 0 && q < run.size; q += direction) {
      const box = run.spans[q].getClientRects()[0];
      if (!box || direction * (box.top - from.top) < from.height / 2) continue;
      if (line !== null && direction * (box.top - line) > from.height / 2) break;
      line ??= box.top;
      const away = Math.abs(box.left + box.width / 2 - from.left - from.width / 2);
      if (away < distance) [best, distance] = [q, away];
    }
    return best;
  }
  texts.addEventListener("keydown", event => {
    const span = tokenOf(event);
    if (!span || event.ctrlKey || event.altKey || event.metaKey) return;
    const run = runs[Number(span.closest(".run").dataset.run)], p = Number(span.dataset.p);
    const moves = {
      ArrowLeft: () => p - 1, ArrowRight: () => p + 1, Home: () => 0, End: () => run.size - 1,
      ArrowUp: () => vertical(run, p, -1), ArrowDown: () => vertical(run, p, 1),
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      state.pinned = !(state.pinned && p === state.token);
      point(p, true);
    } else if (moves[event.key]) {
      event.preventDefault();
      run.spans[Math.min(Math.max(moves[event.key](), 0), run.size - 1)].focus();
    }
  });
  addEventListener("keydown", event => {
    if (event.key !== "Escape" || !state.pinned) return;
    state.pinned = false;
    tell(true);
  });
  $("token").addEventListener("change", () => {
    const p = Math.min(Math.max(Math.round(Number($("token").value)) || 0, 0), Number($("token").max));
    point(p, true);
    marked[0]?.scrollIntoView({ block: "center" });
  });

  state.time = Math.min(1, latest);
  paint();
  document.body.dataset.ready = "";
})().catch(error => {
  document.querySelector("header").append(Object.assign(document.createElement("p"), { className: "note", textContent: `The page cannot be drawn here: ${error.message}` }));
  throw error;
});
