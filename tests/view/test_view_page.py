"""The page in a real browser: every class it paints against the runs themselves, and every way to use it."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from browser import BROWSER, open_page
from checkpoint import save_tiny_checkpoint

from kvretain import load_model
from kvretain.data import chapter
from kvretain.view import Eviction, Run, html_page, record
from kvretain.view.collect import DISCOUNTED, HUB, PROTECTED
from kvretain.view.page import packed

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")

NASTY = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> &amp; <!-- \u2028 🫖 "
POLICIES = ("snapkv", "snapkv+hub@shared(floor=0.2)")
PROMPT, NEW, EVERY = 150, 40, 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    model, tokenizer = load_model(str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))))
    ids = tokenizer(NASTY + chapter(), return_tensors="pt")["input_ids"][:, :PROMPT]
    return [record(model, tokenizer, ids, policy, new_tokens=NEW, budget=48, every=EVERY) for policy in POLICIES]


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_page(runs, title="A <b>title</b>", note="a note", command="kvretain view"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tab(written, tmp_path_factory):
    with open_page(written, tmp_path_factory.mktemp("profile")) as page:
        yield page
        assert page.complaints == []


@pytest.fixture
def page(tab, written):
    """The page as it opens, in a wide window."""
    tab.resize(1200, 900)
    tab.go(written)
    tab.settle()
    yield tab
    assert tab.complaints == []


# What it says, written out slowly


def grid(run, index, name):
    present = run.present(index)
    values = torch.zeros(present.shape, dtype=torch.float32)
    values[present] = getattr(run.evictions[index], name).float()
    return values


def chosen(run, layer, head):
    """``(L, H)`` bool."""
    mask = torch.ones(run.left.shape[:2], dtype=torch.bool)
    if layer >= 0:
        mask &= (torch.arange(mask.shape[0]) == layer)[:, None]
    if head >= 0:
        mask &= torch.arange(mask.shape[1]) == head
    return mask


def done_at(run, time):
    return sum(eviction.step <= time - 1 for eviction in run.evictions) if time else 0


def held(run, time, heads):
    return ((run.left >= done_at(run, time)) & (run.entered <= max(time - 1, 0)))[heads].sum(0)


def painted(run, other, time, layer, head):
    """The classes of each token."""
    heads, done, step = chosen(run, layer, head), done_at(run, time), max(time - 1, 0)
    among, last = int(heads.sum()), max(done - 1, 0)
    mine, theirs = held(run, time, heads), None if other is None else held(other, time, heads)
    flags = torch.stack([grid(run, index, "flags") for index in range(len(run.evictions))]).int()
    steps = torch.tensor([eviction.step for eviction in run.evictions])
    events = run.left.clamp_max(last)
    scored = (run.entered <= steps[events]) & heads[..., None]
    bits = flags.gather(0, events[None])[0] * scored
    gone = (run.left == done - 1) & heads[..., None]
    found = []
    for p in range(len(run.ids)):
        if run.entered[p] > step:
            found.append({"k6"})
            continue
        share = int(mine[p]) / among
        names = {"k0" if share == 0 else "k5" if share == 1 else f"k{1 + sum(share > b for b in (0.1, 0.25, 0.5))}"}
        if theirs is not None and run.ids[: p + 1] == other.ids[: p + 1]:
            more = int(mine[p]) - int(theirs[p])
            names |= (
                {"more"} if more >= math.ceil(among / 10) else {"less"} if -more >= math.ceil(among / 10) else set()
            )
        number = int(scored[..., p].sum())
        for name, flag in (("hub", HUB), ("disc", DISCOUNTED)):
            if number and 2 * int((bits[..., p] & flag > 0).sum()) >= number:
                names.add(name)
                break
        if time and done and steps[done - 1] == step and int(gone[..., p].sum()) >= max(int(mine[p]), 1):
            names.add("gone")
        found.append(names)
    return found


def classes(page, run):
    listed = page.run(f"[...document.querySelectorAll('section[data-run=\"{run}\"] span')].map(e => e.className)")
    return [set(names.split()) - {"at"} for names in listed]


@needs_browser
@pytest.mark.parametrize("time", [0, 1, 2, 13, 14, 30, 40])
@pytest.mark.parametrize(("layer", "head"), [(-1, -1), (1, -1), (-1, 0), (0, 1)])
def test_every_token_is_painted_as_the_runs_say(page, runs, time, layer, head):
    page.choose("#layer", layer)
    page.choose("#head", head)
    page.slide(time)
    for number, run in enumerate(runs):
        other = None if number == 0 else runs[0]
        assert classes(page, number) == painted(run, other, time, layer, head)


@needs_browser
def test_all_kinds_of_marks_do_occur(page, runs):
    page.choose("#head", 1)
    page.choose("#layer", 0)
    page.slide(1)
    seen = set().union(*classes(page, 0), *classes(page, 1))
    assert seen == {"k0", "k5", "k6", "more", "less", "hub", "disc", "gone"}
    page.choose("#marks", 1)
    assert "disc" not in set().union(*classes(page, 1)) and "hub" in set().union(*classes(page, 1))
    page.choose("#marks", 0)
    assert not {"hub", "disc"} & set().union(*classes(page, 1))


@needs_browser
def test_the_text_is_the_text_and_nothing_in_it_is_run(page, runs):
    for number, run in enumerate(runs):
        shown = page.run(
            f"[...document.querySelectorAll('section[data-run=\"{number}\"] span')].map(e => e.textContent)"
        )
        assert shown == [piece.replace("\n", "↵\n") or "·" for piece in run.pieces]
    assert NASTY in "".join(runs[0].pieces)
    assert page.run("document.title") == "A <b>title</b> – what is kept"
    assert page.text("h1") == "A <b>title</b>"
    assert page.run("document.querySelectorAll('main img, main script, main b').length") == 0


@needs_browser
def test_a_token_that_is_markup_by_itself_is_shown_as_text(runs, tmp_path):
    pieces = (runs[0].pieces[0], NASTY, "<b>bold</b>", "&lt;", *runs[0].pieces[4:])
    path = tmp_path / "nasty.html"
    path.write_text(
        html_page([dataclasses.replace(runs[0], pieces=pieces, policy=NASTY)], title=NASTY), encoding="utf-8"
    )
    with open_page(path, tmp_path / "profile") as page:
        shown = page.run("[...document.querySelectorAll('main span')].slice(0, 4).map(e => e.textContent)")
        assert shown == [*pieces[:4]]
        assert page.text("h1") == page.text("#names h2") == NASTY
        assert page.run("document.querySelectorAll('img, main b, main script').length") == 0
        page.point('span[data-p="1"]')
        assert NASTY in details(page)[0] and page.run("document.querySelectorAll('img').length") == 0
        assert page.run("document.title").startswith("</script>") and page.complaints == []


@needs_browser
def test_what_is_compared_with_can_be_changed(page, runs):
    page.slide(1)
    page.choose("#against", 1)
    assert classes(page, 0) == painted(runs[0], runs[1], 1, -1, -1)
    assert classes(page, 1) == painted(runs[1], None, 1, -1, -1)
    page.choose("#against", -1)
    assert not {"more", "less"} & set().union(*classes(page, 0), *classes(page, 1))


@needs_browser
def test_the_share_of_common_entries(page, runs):
    for time, layer in ((1, -1), (20, 1), (40, -1)):
        page.slide(time)
        page.choose("#layer", layer)
        heads = chosen(runs[1], layer, -1)
        same = sum(a == b for a, b in zip(runs[0].ids, runs[1].ids, strict=False))
        assert runs[0].ids[:same] == runs[1].ids[:same]
        mine, theirs = (run.kept(time - 1)[heads][:, :same] for run in runs[::-1])
        share = float((mine & theirs).sum() / mine.sum())
        assert f"{100 * share:.0f} % of them also kept by snapkv" in page.text("#names > div:nth-child(2)")


@needs_browser
def test_bars_are_the_entries_of_each_head_and_choose_it(page, runs):
    page.slide(20)
    for number, run in enumerate(runs):
        lengths = run.kept(19).sum(-1)
        titles = page.run(
            f"[...document.querySelectorAll('#budgets figure:nth-child({number + 1}) button')].map(e => [e.title, "
            "e.getAttribute('aria-label'), e.firstChild.style.height])"
        )
        most = max(int(r.kept(19).sum(-1).max()) for r in runs)
        expected = []
        for head in range(2):
            for layer in range(2):
                entries = int(lengths[layer, head])
                label = f"layer {layer}, head {head}: {entries} entries"
                expected.append([label, label, pytest.approx(100 * entries / most, abs=0.01)])
        assert [[a, b, float(c.rstrip("%"))] for a, b, c in titles] == expected
    assert runs[1].kept(19).sum(-1).unique().numel() > 1, "unequal heads are among them"
    page.click("#budgets figure:nth-child(2) button[title^='layer 1, head 0']")
    assert page.run("[+layer.value, +head.value]") == [1, 0]
    assert classes(page, 1) == painted(runs[1], runs[0], 20, 1, 0)
    pressed = "[...document.querySelectorAll('#budgets [aria-pressed=true]')].map(e => e.title.slice(0, 15))"
    assert page.run(pressed) == ["layer 1, head 0"] * 2
    page.press("ArrowUp")
    page.press("ArrowDown")
    page.press("Enter")
    assert page.run("[+layer.value, +head.value]") == [1, 1]
    page.press("Enter")
    assert page.run("[+layer.value, +head.value]") == [-1, -1]


# One token


def details(page):
    return page.run("[...document.querySelectorAll('#details p')].map(e => e.textContent)")


@needs_browser
@pytest.mark.parametrize("p", [0, 90, 130, PROMPT + 1])
def test_pointing_at_a_token_says_how_one_head_valued_it(page, runs, p):
    page.choose("#layer", 1)
    page.choose("#head", 0)
    page.slide(20)
    page.point(f'section[data-run="1"] span[data-p="{p}"]')
    run, lines = runs[1], details(page)
    assert lines[0].startswith(f"Token {p} ")
    own = lines[next(i for i, line in enumerate(lines) if line.startswith(POLICIES[1])) :]
    left, done = int(run.left[1, 0, p]), done_at(run, 20)
    index = min(left, done - 1)
    step = run.evictions[index].step
    when = f"after {step} written tokens" if step else "after the prompt"
    assert own[0] == f"{POLICIES[1]}: " + (f"evicted {when}" if left < done else "held")
    flags = grid(run, index, "flags")[1, 0].int()
    present = run.present(index)[1, 0]
    open_ = present & (flags & PROTECTED == 0)
    kind = ", a discounted neighbour" if flags[p] & DISCOUNTED else ", a hub" if flags[p] & HUB else ""
    lines = [f"protected {when}, whatever its score"]
    if open_[p]:
        scores, refined = (grid(run, index, name)[1, 0] for name in ("scores", "refined"))

        def place(values):
            rounded = float(values[p].to(torch.bfloat16))
            return f"{rounded:.3g} (place {1 + int((values[open_] > values[p]).sum())} of {int(open_.sum())})"

        lines = [f"score {when} {place(scores)}{kind}", f"refined to {place(refined)}"]
    assert len(own[1:-1]) == len(lines) and all(alike(a, b) for a, b in zip(own[1:-1], lines, strict=True)), own
    cosine = float(grid(run, index, "cosines")[1, 0, p])
    assert own[-1].startswith("cosine to the most alike entry kept ")
    assert float(own[-1].split()[-1]) == pytest.approx(cosine, abs=0.01)


def alike(said, expected):
    """Equal but for how numbers with a fraction are rounded: Python and JavaScript differ where a half is cut."""
    pairs = zip(re.split(r"[\s,()]+", said), re.split(r"[\s,()]+", expected), strict=True)
    return all(a == b or ("." in a and float(a) == pytest.approx(float(b), rel=6e-3)) for a, b in pairs)


@needs_browser
def test_pointing_says_what_several_heads_made_of_it(page, runs):
    page.slide(1)
    page.point('section[data-run="0"] span[data-p="90"]')
    run, lines = runs[0], details(page)
    assert f"snapkv: held by {int(held(run, 1, chosen(run, -1, -1))[90])} of 4 heads" in lines
    hubs = int((grid(run, 0, "flags")[..., 90].int() & HUB > 0).sum())
    assert any(line == f"hub in {hubs} of 4 heads" for line in lines) == (hubs > 0)
    cosines = grid(run, 0, "cosines")[..., 90]
    (said,) = [line for line in lines if "cosine" in line][:1]
    mean, low, high = (float(n) for n in re.findall(r"-?\d\.\d\d", said))
    for number, expected in ((mean, cosines.mean()), (low, cosines.min()), (high, cosines.max())):
        assert number == pytest.approx(float(expected), abs=0.011)
    marked = page.run("[...document.querySelectorAll('[aria-current]')].map(e => +e.dataset.p)")
    assert marked == [90, 90], "the token is marked in both texts"
    holding = page.run(
        "[...document.querySelectorAll('#budgets figure:first-child .holds')].map(e => e.title.slice(0, 15))"
    )
    kept = run.kept(0)[..., 90]
    assert set(holding) == {f"layer {layer}, head {head}" for layer, head in kept.nonzero().tolist()}


@needs_browser
def test_tokens_that_are_not_there_yet_say_so(page, runs):
    page.slide(3)
    page.point(f'section[data-run="0"] span[data-p="{PROMPT + 10}"]')
    assert "snapkv: not in the cache yet" in details(page)
    page.slide(NEW)
    assert "snapkv: not in the cache yet" not in details(page)
    page.point(f'section[data-run="0"] span[data-p="{PROMPT + NEW - 1}"]')
    assert any(
        re.match(r"snapkv.*: the last token written: it never enters the cache$", line) for line in details(page)
    )
    page.point(f'section[data-run="0"] span[data-p="{PROMPT + NEW - 2}"]')
    assert any(re.match(r"snapkv.*: held by 4 of 4 heads$", line) for line in details(page))
    assert details(page)[2] == "not scored yet"


@needs_browser
def test_a_click_holds_on_to_a_token_and_escape_lets_go(page):
    page.click('section[data-run="0"] span[data-p="90"]')
    page.point('section[data-run="0"] span[data-p="95"]')
    assert details(page)[0].startswith("Token 90 ") and "held on to" in details(page)[0]
    page.press("Escape")
    page.point('section[data-run="0"] span[data-p="96"]')
    assert details(page)[0].startswith("Token 96 ")


# Keys


def focused(page):
    return page.run(
        "(e => e.dataset.p ? [+e.closest('.run').dataset.run, +e.dataset.p] : e.id || e.title || e.tagName)"
        "(document.activeElement)"
    )


@needs_browser
def test_everything_is_reached_by_tab_and_each_text_is_one_stop(page):
    page.run("document.activeElement.blur()")
    stops = []
    for _ in range(20):
        page.press("Tab")
        stops.append(focused(page))
        if stops[-1] == [1, 0]:
            break
    bars = ["layer 0, head 0"]
    assert [s if isinstance(s, list) else s[:15] for s in stops] == [
        "SUMMARY", "back", "time", "forward", "play", "layer", "head", "against", "show", "marks", "token",
        *bars, *bars, [0, 0], [1, 0],
    ]  # fmt: skip


@needs_browser
def test_arrow_keys_go_from_token_to_token_and_the_live_region_speaks(page, runs):
    page.run("document.querySelector('section[data-run=\"1\"] span').focus()")
    page.press("ArrowRight", 3)
    assert focused(page) == [1, 3]
    assert page.text("#say").startswith("Token 3 ") and f"{POLICIES[1]}: held by" in page.text("#say")
    page.press("ArrowLeft")
    assert focused(page) == [1, 2]
    top = "document.activeElement.getBoundingClientRect().top + scrollY"
    before = page.run(top)
    page.press("ArrowDown")
    lower = focused(page)
    assert page.run(top) > before and lower[1] > 2
    page.press("ArrowUp")
    assert abs(focused(page)[1] - 2) <= 1
    page.press("End")
    assert focused(page) == [1, len(runs[1].ids) - 1]
    page.press("ArrowRight")
    assert focused(page) == [1, len(runs[1].ids) - 1]
    page.press("Home")
    page.press("ArrowUp")
    assert focused(page) == [1, 0]
    page.press("Enter")
    assert "held on to" in details(page)[0]
    page.press("Enter")
    assert "held on to" not in details(page)[0]
    outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus can be seen"


@needs_browser
def test_the_slider_and_its_buttons_replay_the_evictions(page, runs):
    assert page.run("+time.value") == 1
    stops = sorted({0, NEW, *(eviction.step + 1 for run in runs for eviction in run.evictions)})
    page.run("time.focus()")
    page.press("ArrowLeft")
    assert page.text("#now") == f"{PROMPT} tokens read, nothing evicted yet"
    assert page.run("back.disabled")
    for stop in stops[1:]:
        page.click("#forward")
        assert page.run("+time.value") == stop
        assert ("an eviction has ended this pass" in page.text("#now")) == (
            stop - 1 in [e.step for e in runs[0].evictions]
        )
        assert page.run("time.getAttribute('aria-valuetext')") == page.text("#now")
    assert page.run("forward.disabled")
    page.click("#back")
    assert page.run("+time.value") == stops[-2]
    page.run("time.focus()")
    page.press("ArrowRight", 2)
    assert page.run("+time.value") == min(stops[-2] + 2, NEW)
    assert classes(page, 0) == painted(runs[0], None, min(stops[-2] + 2, NEW), -1, -1)


@needs_browser
def test_play_runs_to_the_end_and_pauses(page):
    page.slide(NEW - 4)
    page.click("#play")
    assert page.text("#play") == "Pause"
    page.wait(f"+time.value === {NEW} && play.textContent === 'Play'", timeout=10)
    page.click("#play")
    page.wait("+time.value >= 2 && +time.value < 30")
    page.click("#play")
    stopped = page.run("+time.value")
    page.run("new Promise(done => setTimeout(done, 400))")
    assert page.run("+time.value") == stopped and page.text("#play") == "Play"


@needs_browser
def test_the_number_field_finds_a_token(page):
    page.run("token.value = 120; token.dispatchEvent(new Event('change'))")
    page.settle()
    assert details(page)[0].startswith("Token 120 ") and page.text("#say").startswith("Token 120 ")
    inside = (
        "(b => b.top > 0 && b.bottom < innerHeight)(document.querySelector('[aria-current]').getBoundingClientRect())"
    )
    assert page.run(inside)
    page.run("token.value = 99999; token.dispatchEvent(new Event('change'))")
    assert page.run("+token.value") == PROMPT + NEW - 1


@needs_browser
def test_every_control_has_a_name_for_screen_readers(page):
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    named = {}
    for node in nodes:
        if not node.get("ignored"):
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "slider", "combobox", "spinbutton", "region"):
        assert named.get(role) and all(named[role]), role
    assert {"Time, in passes of the model", "Layer", "Head", "Compare with", "Show", "Marks", "Token"} <= {
        name for role in ("slider", "combobox", "spinbutton") for name in named[role]
    }
    assert f"Entries per head under {POLICIES[0]}; arrow keys go from bar to bar, Enter chooses" in named["group"]
    assert f"The text under {POLICIES[0]}; arrow keys go from token to token" in named["region"]


# Sizes


@needs_browser
@pytest.mark.parametrize("width", [360, 620, 900, 1600])
def test_nothing_makes_the_page_scroll_sideways(page, width):
    page.resize(width, 800)
    page.settle()
    assert page.run("document.documentElement.scrollWidth") <= width
    lefts = page.run(
        "[...document.querySelectorAll('section.run')].map(e => e.firstChild.getBoundingClientRect().left)"
    )
    assert len(set(lefts)) == (1 if width < 640 else 2), "side by side where there is room"


@needs_browser
def test_a_narrow_window_opens_with_one_policy_and_shows_the_others_on_demand(page, written, runs):
    page.resize(375, 760)
    page.go(written)
    page.settle()
    visible = (
        "[...document.querySelectorAll('section.run')].filter(e => e.style.display !== 'none').map(e => +e.dataset.run)"
    )
    assert page.run(visible) == [1]
    assert classes(page, 1) == painted(runs[1], runs[0], 1, -1, -1)
    page.choose("#show", 0)
    assert page.run(visible) == [0] and classes(page, 0) == painted(runs[0], None, 1, -1, -1)
    page.choose("#show", -1)
    assert page.run(visible) == [0, 1]
    page.run("scrollTo(0, 1500)")
    page.settle()
    assert page.run("clock.getBoundingClientRect().top") == 0, "the time stays in sight"


@needs_browser
def test_shades_differ_without_colour_too(page):
    page.click("#help summary")
    shades = page.run(
        "[0,1,2,3,4,5].map(k => { const s = getComputedStyle(document.querySelector(`.legend .k${k}`)); "
        "return [s.backgroundColor, s.color, s.boxShadow]; })"
    )

    def luminance(colour):
        parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
        if colour == "rgba(0, 0, 0, 0)":
            parts = [1, 1, 1]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = [luminance(ground) for ground, _, _ in shades]
    assert grounds == sorted(grounds, reverse=True) and len(set(grounds)) == 6, "they darken"
    assert len({bar for _, _, bar in shades}) == 6, "and their bars differ"
    for ground, ink, _ in shades:
        dark, light = sorted((luminance(ground), luminance(ink)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, "text stays readable"
    styles = page.run(
        "(look => [look('.more').outlineStyle, look('.less').outlineStyle, look('.hub').textDecorationStyle, "
        "look('.disc').textDecorationStyle])(c => getComputedStyle(document.querySelector('.legend ' + c)))"
    )
    assert styles == ["solid", "dashed", "solid", "dotted"]


# Long texts


def long_run(policy, seed, layers, heads=3, tokens=8192, new=128, budget=1024, every=32):
    """A run of 8k tokens with random scores; no model of these tests could be asked."""
    generator, size = torch.Generator().manual_seed(seed), tokens
    prompt = tokens - new
    left, entered = torch.full((layers, heads, size), -1), (torch.arange(size) - prompt + 1).clamp_min(0)
    evictions = []
    for step in range(0, new, every):
        present = (left < 0) & (entered <= step)
        scores = torch.rand(layers, heads, size, generator=generator).masked_fill(~present, -1)
        keep = torch.zeros_like(present).scatter_(2, scores.topk(budget).indices, True)
        left[present & ~keep] = len(evictions)
        found = scores[present]
        flags = torch.randint(0, 3, found.shape, generator=generator).mul(2).to(torch.uint8)
        evictions.append(Eviction(step, found, None, torch.zeros_like(found), flags))
    left[left < 0] = len(evictions)
    pieces = tuple(("word " if p % 19 else "word.\n") for p in range(size))
    return Run(policy, tuple(range(size)), pieces, prompt, tuple(range(layers)), left, tuple(evictions), (1,) * new)


@needs_browser
@pytest.mark.parametrize("layers", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_a_repaint_of_8k_tokens_is_quick(tmp_path, layers):
    """The times in docs/view.md are those that ``pytest -m slow -s tests/view`` prints."""
    path = tmp_path / "long.html"
    runs = [long_run("a", 0, layers), long_run("b", 1, layers)]
    path.write_text(html_page(runs, title="long"), encoding="utf-8")
    with open_page(path, tmp_path / "profile") as page:
        times = page.run(
            """(async () => {
              const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
              const set = (id, value, kind) => () => {
                const control = document.getElementById(id);
                control.value = value;
                control.dispatchEvent(new Event(kind));
              };
              const times = {};
              const acts = {nothing: () => {}, step: set("time", 2, "input"), eviction: set("time", 33, "input"),
                            head: set("head", 1, "change")};
              for (const [name, act] of Object.entries(acts)) {
                await frame();
                const start = performance.now();
                act();
                await frame();
                times[name] = Math.round(performance.now() - start);
              }
              return {...times, ready: Math.round(performance.now())};
            })()"""
        )
        print(json.dumps({"heads": 3 * layers, "megabytes": round(path.stat().st_size / 1e6, 1), "ms": times}))
        assert max(times["step"], times["eviction"], times["head"]) < 1000, "about a tenth of that on an idle core"
        assert page.run("document.querySelectorAll('section[data-run=\"0\"] span').length") == 8192
        assert page.complaints == []


# What needs no browser


def test_the_page_loads_nothing_and_data_cannot_end_the_script(runs, written):
    text = written.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert text.count("</script>") == 2, "the page's own"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[1]) == packed(runs)


@needs_browser
def test_a_single_run_that_evicts_nothing(llama, tmp_path):
    ids = torch.randint(1, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    words = SimpleNamespace(pad_token_id=0, decode=lambda ids, **options: "".join(f"{n} " for n in ids))
    path = tmp_path / "full.html"
    path.write_text(html_page([record(llama, words, ids, "full", new_tokens=4)], title="all of it"), encoding="utf-8")
    with open_page(path, tmp_path / "profile") as page:
        page.slide(4)
        assert classes(page, 0) == [{"k5"}] * 23 + [{"k6"}]
        page.point('section[data-run="0"] span[data-p="5"]')
        assert details(page)[1:] == ["held by 4 of 4 heads", "not scored yet"]
        assert page.run("document.getElementById('against').closest('label').offsetHeight") == 0
        assert page.complaints == []


def test_runs_that_do_not_belong_together_are_refused(runs):
    with pytest.raises(ValueError, match="at least one run"):
        html_page([], title="x")
    other = Run(**(vars(runs[1]) | {"ids": (0, *runs[1].ids[1:])}))
    with pytest.raises(ValueError, match="read different prompts"):
        html_page([runs[0], other], title="x")
    other = Run(**(vars(runs[1]) | {"layers": (0, 7)}))
    with pytest.raises(ValueError, match="are of different models"):
        html_page([runs[0], other], title="x")
