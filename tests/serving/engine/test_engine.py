"""The engine's step API: what it refuses, how requests end, what fails alone."""

import re
import time

import pytest
import torch

pytest.importorskip("transformers")
from octavo.errors import CapacityError, ConfigError, UnsupportedError
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.serving.tiny_engine import (
    VOCABULARY,
    finish,
    make_engine,
    make_model,
    make_prompt,
    make_request,
    run,
    tokenizer,
)


@pytest.fixture
def engine():
    made = make_engine()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (make_request(images=(object(),)), UnsupportedError, "got images.*qwen3_vl"),
        (make_request(prompt=(1, VOCABULARY)), ConfigError, rf"\[0, {VOCABULARY}\), got 300"),
        (make_request(prompt=(1, -1)), ConfigError, "got -1"),
        (make_request(length=510), ConfigError, r"context of 512 tokens, got 510 \+ 6"),
        (make_request(grammar="json"), ConfigError, "got str"),
        (make_request(logit_bias=((300, 1),)), ConfigError, r"logit_bias in \[0, 300\), got 300"),
        (make_request(logit_bias=((-1, 1),)), ConfigError, "logit_bias .*got -1"),
    ],
    ids=["images", "token", "negative", "long", "grammar", "bias", "negative bias"],
)
def test_what_can_never_run_is_refused(engine, request_, error, message):
    with pytest.raises(error, match=message):
        engine.add(request_)
    assert not engine.has_work


def test_stop_texts_need_a_tokenizer():
    engine = load_engine(make_model(), None, EngineSettings(num_pages=4, max_num_seqs=1))
    try:
        with pytest.raises(ConfigError, match="stop texts need a tokenizer"):
            engine.add(make_request(stop=("x",)))
        assert run(engine, make_request())[0].text == ""
    finally:
        engine.close()


def test_a_full_queue_is_refused_and_leaves_no_trace():
    engine = make_engine(max_queue=1)
    engine.add(make_request("a"))
    with pytest.raises(CapacityError, match="retry later"):
        engine.add(make_request("b"))
    (done,) = finish(engine, ["a"])
    assert done.finish_reason == "length"
    assert run(engine, make_request("b"))[0].tokens == done.tokens
    engine.close()


def test_nothing_to_do_is_no_step(engine):
    assert engine.step() == [] and not engine.has_work
    assert engine.stats().num_steps == 0
    engine.abort("nobody")
    assert engine.step() == []


def test_an_aborted_request_ends_with_one_delta(engine):
    engine.add(make_request("a", max_tokens=20))
    engine.add(make_request("b", which=1))
    first = engine.step()
    assert {delta.request_id for delta in first} == {"a", "b"}
    engine.abort("a")
    assert engine.has_work
    deltas = [delta for delta in engine.step() if delta.request_id == "a"]
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    assert deltas[0].usage.completion_tokens == 1
    engine.abort("a")
    (done,) = finish(engine, ["b"])
    assert done.finish_reason == "length"
    assert engine.stats().num_pages_in_use == 0 and engine.stats().num_finished == 2


def test_close_ends_all_and_gives_the_model_back():
    model = make_model()
    ids = torch.tensor([make_prompt(20)])
    before = model(ids).logits
    engine = make_engine(model, max_num_seqs=1)
    assert model.config._attn_implementation == "octavo_engine"
    with pytest.raises(UnsupportedError, match="close the engine first"):
        model(ids)
    with pytest.raises(ConfigError, match="close the engine"):
        make_engine(model)
    for name in "ab":
        engine.add(make_request(name))
    engine.step()
    engine.close()
    engine.close()
    assert {d.request_id: d.finish_reason for d in engine.step()} == {"a": "abort", "b": "abort"}
    assert engine.step() == [] and engine.stats().num_pages_in_use == 0
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(ConfigError, match="was closed"):
        engine.add(make_request())


def test_an_engine_that_cannot_be_made_leaves_the_model_alone():
    model = make_model()
    with pytest.raises(ConfigError, match="max_context up to 512"):
        make_engine(model, max_context=513)
    assert model.config._attn_implementation == "eager"
    assert not any("octavo" in name for name, _ in model.named_modules())


def test_restore_leaves_an_open_engine_alone(engine):
    import octavo

    with pytest.raises(ConfigError, match="as it was made"):
        octavo.restore_(engine._model.model)
    assert run(engine, make_request())[0].finish_reason == "length"


def test_a_pass_that_fails_ends_its_requests_and_no_others(engine, monkeypatch):
    engine.add(make_request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda batch: 1 / 0)
        (delta,) = engine.step()
    assert (delta.finish_reason, delta.error) == ("error", "ZeroDivisionError: division by zero")
    assert engine.stats().num_pages_in_use == 0
    truth = run(make_engine(), make_request("b"))
    assert run(engine, make_request("b")) == truth


def test_bad_logits_end_their_own_request(engine, monkeypatch):
    truth = run(engine, make_request("b", which=1))[0].tokens
    compute = engine._runner.run

    def spoil(batch):
        logits = compute(batch)
        names = [sequence.request_id for sequence in batch.sampled]
        logits[[name == "a" for name in names]] = torch.nan
        return logits

    monkeypatch.setattr(engine._runner, "run", spoil)
    bad, good = run(engine, make_request("a"), make_request("b", which=1))
    assert bad.finish_reason == "error" and "finite" in bad.error and bad.tokens == ()
    assert (good.finish_reason, good.tokens) == ("length", truth)


def test_eos_and_stop_tokens_end_an_answer(engine):
    answer = run(engine, make_request(max_tokens=8))[0].tokens
    third = answer[2]
    assert third not in answer[:2]
    (stopped,) = run(engine, make_request(max_tokens=8, stop_token_ids=(third,)))
    assert (stopped.tokens, stopped.finish_reason) == (answer[:3], "stop")
    assert stopped.text == tokenizer().decode(list(answer[:2]))
    model = make_model()
    model.generation_config.eos_token_id = [third]
    own = make_engine(model)
    (ended,) = run(own, make_request(max_tokens=8))
    assert (ended.tokens, ended.text) == (stopped.tokens, stopped.text)
    assert ended.finish_reason == "stop"
    (on,) = run(own, make_request(max_tokens=8, ignore_eos=True))
    assert (on.tokens, on.finish_reason) == (answer, "length")
    (late,) = run(own, make_request(max_tokens=8, min_tokens=8))
    assert len(late.tokens) == 8 and third not in late.tokens
    own.close()


def test_a_stop_text_ends_an_answer(engine):
    request = make_request(max_tokens=12)
    (whole,) = run(engine, request)
    stop = whole.text[3:6]
    (cut,) = run(engine, make_request(max_tokens=12, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert whole.tokens[: len(cut.tokens)] == cut.tokens and len(cut.tokens) < 12


def test_text_streams_to_the_same_text(engine):
    (done,) = run(engine, make_request(max_tokens=30, length=7))
    assert done.text == tokenizer().decode(list(done.tokens), clean_up_tokenization_spaces=False)


def test_a_seed_decides_whatever_else_runs(engine):
    def ask(seed):
        return make_request("a", temperature=1.0, seed=seed, max_tokens=8)

    (alone,) = run(engine, ask(11))
    others = [make_request(str(i), length=9 + i, which=i, temperature=1.0) for i in range(3)]
    again, *_ = run(engine, ask(11), *others)
    assert again.tokens == alone.tokens
    assert run(engine, ask(12))[0].tokens != alone.tokens


def test_requests_without_a_seed_differ_and_engines_repeat_themselves():
    def answers():
        engine = make_engine(seed=5)
        found = run(engine, *(make_request(name, temperature=1.0) for name in "ab"))
        engine.close()
        return [done.tokens for done in found]

    first = answers()
    assert first[0] != first[1]
    assert answers() == first


class OnlyFive:
    """A grammar: token 5, twice."""

    def __init__(self, fails_at=None):
        self.count, self.fails_at = 0, fails_at

    def start(self):
        return OnlyFive(self.fails_at)

    def allowed(self, device):
        if self.count == self.fails_at:
            raise UnsupportedError("too complex")
        return torch.arange(VOCABULARY) == 5

    def advance(self, token):
        assert token == 5
        self.count += 1

    @property
    def is_finished(self):
        return self.count == 2


def test_a_grammar_rules_its_own_request(engine):
    truth = run(engine, make_request("b", which=1))[0].tokens
    guided, failed, free = run(
        engine,
        make_request("a", grammar=OnlyFive()),
        make_request("c", grammar=OnlyFive(fails_at=1)),
        make_request("b", which=1),
    )
    assert (guided.tokens, guided.finish_reason) == ((5, 5), "stop")
    assert (failed.tokens, failed.finish_reason, failed.error) == ((5,), "error", "too complex")
    assert free.tokens == truth


def test_logprobs_come_with_each_token(engine):
    (done,) = run(engine, make_request(logprobs=2))
    assert [one.token for one in done.logprobs] == list(done.tokens)
    assert all(len(one.top) == 2 and one.top[0][0] == one.token for one in done.logprobs)
    assert run(engine, make_request())[0].logprobs is None


def test_a_bias_rules_its_own_request(engine):
    (truth,) = run(engine, make_request("a"))
    banned = tuple((token, -100) for token in set(truth.tokens))
    forced, other, plain = run(
        engine,
        make_request("b", logit_bias=((7, 100),), max_tokens=4),
        make_request("c", logit_bias=banned),
        make_request("d"),
    )
    assert forced.tokens == (7,) * 4
    assert not set(other.tokens) & set(truth.tokens)
    assert plain.tokens == truth.tokens


def test_a_second_turn_finds_the_first(engine):
    (first,) = run(engine, make_request("a", length=30, max_tokens=20))
    prompt = make_prompt(30) + first.tokens + (7,)
    (second,) = run(engine, make_request("b", prompt=prompt))
    assert second.usage.cached_tokens == 48  # three pages of 16; the 50th token was never computed
    fresh = make_engine(enable_prefix_caching=False)
    (alone,) = run(fresh, make_request("b", prompt=prompt))
    assert alone.tokens == second.tokens and alone.usage.cached_tokens == 0
    fresh.close()


def test_an_answer_follows_its_grammar(engine):
    pytest.importorskip("llguidance")
    from octavo.serving.engine.guided import Grammar

    grammar = Grammar.from_regex("[0-9]{3}-(yes|no)", tokenizer(), eos_tokens=[0])
    requests = [
        make_request(str(i), grammar=grammar, temperature=1.0, seed=i, max_tokens=12)
        for i in range(3)
    ]
    answers = run(engine, *requests, make_request("free", which=1))
    assert all(re.fullmatch("[0-9]{3}-(yes|no)", done.text) for done in answers[:3])
    assert [done.finish_reason for done in answers] == ["stop"] * 3 + ["length"]
    assert len({done.text for done in answers[:3]}) > 1


def test_a_delta_says_when_the_first_pass_over_its_request_began():
    """A prompt of two passes; the other request waits for the first to end."""
    engine = make_engine(max_num_seqs=1)
    times = [time.perf_counter()]
    engine.add(make_request("long", length=100, max_tokens=3))
    engine.add(make_request("late", max_tokens=2))
    engine.abort("late")
    (ended,) = engine.step()  # the first pass of the prompt gives it no token
    assert (ended.request_id, ended.begun_s) == ("late", None)
    times.append(time.perf_counter())
    deltas = [delta for _ in range(3) for delta in engine.step()]
    assert [delta.request_id for delta in deltas] == ["long"] * 3
    (begun_s,) = {delta.begun_s for delta in deltas}
    assert times[0] < begun_s < times[1]
    engine.close()
