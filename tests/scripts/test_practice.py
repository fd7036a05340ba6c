"""The comparison of `esper.grow` with the usual ways: what is equal between them, what is kept, and its tables."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import esper
import practice as script
from practice import Options, jobs_of, main, stored
from practice_grown import task_of
from practice_hosts import CONTEXT, GPT, HOSTS, VOCABULARY, WIDER, Data
from practice_plain import accuracy, budget_of, factor, forward_flops, num_params, plans
from practice_seeds import with_seeds
from practice_table import Result, interval, page

BEGIN, END = script.MARKERS
HOST = {host.name: host for host in HOSTS}
RESULT = Result(
    host="tabular", data="a table", examples=100, epochs=2.0, method="plain", seed=1, test=90.0, val=91.0,
    params=1_000, limit=1_500, flops=2e9, budget=2e9, seconds=10.0, chosen="lr 0.01", commit="abc", wall=7.0,
)  # fmt: skip


def results(method, tests, **changes):
    return [replace(RESULT, method=method, seed=seed, test=test, **changes) for seed, test in enumerate(tests, 1)]


def a_table(count=1_280):
    """Random features with classes."""
    draw = torch.Generator().manual_seed(0)
    some = torch.randn(count, 30, generator=draw), torch.randint(5, (count,), generator=draw)
    return Data(label="random", train=some, val=some, test=some)


def a_text(count=64):
    """Random windows with the next characters."""
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(VOCABULARY, (count, CONTEXT + 1), generator=draw)
    some = windows[:, :-1], windows[:, 1:]
    return Data(label="random", train=some, val=some, test=some)


# -- compute ----------------------------------------------------------------------------------------------------------


def test_the_networks_have_the_parameters_that_the_page_says():
    found = {name: (num_params(host.net(1.0)), num_params(host.net(WIDER))) for name, host in HOST.items()}
    assert found["fashion"] == (10_990, 16_975)
    assert [small for small, _ in found.values()] == [10_990, 19_546, 19_954, 208_320, 6_725]
    assert all(1.4 < large / small < 1.6 for small, large in found.values())


def test_a_forward_pass_counts_attention_too():
    # 64 places; per place 4 blocks of 12 * 64^2 weights and 65 * 64 of the output, a multiply-add is two
    linear = 64 * 2 * (4 * 12 * 64**2 + VOCABULARY * 64)
    attention = 4 * 2 * (2 * 64 * 64 * 64)  # queries by keys, and weights by values
    assert forward_flops(HOST["gpt"], a_text(), 1.0) == linear + attention


def test_the_budget_is_three_runs_of_the_network_and_three_measurements():
    data = a_table(1_280)
    forward = 2 * (30 * 64 + 64 * 64 + 64 * 5)
    assert budget_of(HOST["tabular"], data, 2.0) == 3 * forward * (3 * 20 * 128 + 1_280)


@pytest.mark.parametrize(
    ("name", "data", "blueprint", "grown", "price"),
    [("tabular", a_table(), "norm", 2 * (2 * 64 + 1), 1.0), ("gpt", a_text(), "depthwise", 2 * 6 * 64, 1.002)],
)
def test_a_network_with_new_seeds_from_the_start_computes_what_it_computes_alone(name, data, blueprint, grown, price):
    torch.manual_seed(0)
    net, host = with_seeds(HOST[name], data, blueprint, 1.0).eval(), HOST[name]
    torch.manual_seed(0)
    alone = with_seeds(host, data, "none", 1.0).eval()
    x = data.train[0][:4]
    torch.testing.assert_close(net(x), alone(x), rtol=0, atol=0)
    assert num_params(net) - num_params(alone) == grown
    whole = replace(host, net=lambda width: with_seeds(host, data, blueprint, width))
    assert forward_flops(whole, data, 1.0) / forward_flops(host, data, 1.0) == pytest.approx(price, abs=5e-4)


def test_every_usual_way_costs_what_the_budget_is_up_to_one_batch_of_each_run():
    data = a_table(12_800)
    budget = budget_of(HOST["tabular"], data, 3.0)
    found = plans(HOST["tabular"], data, budget)
    assert found["plain"].steps == 300
    assert found["plain"].cost == budget
    assert found["plain, long"].steps == 900 + 2 * 12_800 // (3 * 128)  # two measurements less
    for name, plan in found.items():
        batch = len(plan.rates) * 3 * 128 * forward_flops(HOST["tabular"], data, plan.width)
        assert budget - batch < plan.cost <= budget, name


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    assert [factor(step, 4, 0.0) for step in range(4)] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert [factor(step, 4, 0.5) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5])


def test_accuracy_counts_tokens_or_classes_in_evaluation_mode():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9))
    x, y = torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 1.0], [1.0, 5.0]]), torch.tensor([0, 1, 1, 1])
    data = Data(label="", train=(x, y), val=(x, y), test=(x, y))
    assert accuracy(net, data, (x, y)) == 75.0


def test_a_gpt_sees_no_later_token():
    torch.manual_seed(0)
    net, x = GPT(VOCABULARY, 8, 16), torch.randint(VOCABULARY, (1, 8))
    changed = x.clone()
    changed[0, 5:] = (x[0, 5:] + 1) % VOCABULARY
    torch.testing.assert_close(net(x)[:, :5], net(changed)[:, :5])
    assert not torch.equal(net(x)[:, 5:], net(changed)[:, 5:])


# -- tables -----------------------------------------------------------------------------------------------------------


def test_an_interval_is_that_of_student():
    # standard deviation 1, and t(0.975) is 4.3027 with two degrees of freedom
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.302653 / math.sqrt(3.0)))
    assert interval([5.0])[0] == 5.0
    assert math.isnan(interval([5.0])[1])


def test_differences_are_paired_by_seed():
    ours = results("esper, auto", [90.0, 70.0, 50.0])
    theirs = list(reversed(results("plain", [89.0, 68.0, 47.0])))
    text = page([*theirs, *ours], "esper, auto")
    # 1, 2, 3: mean 2, with the interval of the test above; each alone has a standard deviation of 20 or 21
    assert "| an MLP on a table | 70.00 ± 49.68 | plain | 68.00 ± 52.17 | +2.00 ± 2.48 |" in text
    assert "esper, auto is better than the best usual way on 0 of 1 hosts, worse on 0;" in text


def test_a_host_is_won_against_the_usual_way_with_the_best_test_accuracy():
    ours = results("esper, auto", [90.0, 91.0, 92.0])
    others = results("plain", [80.0, 81.0, 82.0]) + results("wider", [88.9, 90.0, 91.1])
    rival = results("esper, halving", [99.0, 99.0, 99.0])  # is not one of the usual ways
    text = page([*others, *ours, *rival], "esper, auto")
    assert "| wider | 90.00 ± 2.73 | +1.00 ± 0.25 |" in text
    assert "on 1 of 1 hosts, worse on 0;" in text


def test_a_table_shows_cost_and_what_the_reference_is_better_by():
    text = page(results("plain", [90.0, 92.0]) + results("esper, auto", [91.0, 93.0], params=1_400), "esper, auto")
    assert "100 examples of a table; budget 2 GFLOPs, which are 3 x 2 epochs of the network; at most 1,500" in text
    assert "| plain | 91.00 ± 12.71 | +1.00 ± 0.00 | 91.00 | 1,000 | 2 | 10 | 7 |" in text
    assert "| esper, auto | 92.00 ± 12.71 |  | 91.00 | 1,400 | 2 | 10 | 7 |" in text


def test_results_of_another_budget_have_a_table_of_their_own():
    text = page(results("plain", [90.0]) + results("plain", [80.0], epochs=5.0), "esper, auto")
    assert text.count("### An MLP on a table") == 2
    assert "| plain | 90.00 |" in text


# -- the command ------------------------------------------------------------------------------------------------------


def test_what_an_interruption_cut_is_computed_again(tmp_path):
    file = tmp_path / "results.jsonl"
    line = json.dumps(asdict(RESULT)) + "\n"
    file.write_text(line + line[:40])
    assert stored(file) == [RESULT]
    assert file.read_text() == line
    file.write_text(line[:40])
    assert stored(file) == []
    assert file.read_text() == ""


def test_the_small_table_takes_fewer_examples_and_epochs():
    (job,) = jobs_of(Options(hosts=("fashion",), methods=("plain",), seeds=(1,), small=True))
    assert (job.examples, job.epochs) == (8_000, 3)
    (job,) = jobs_of(Options(methods=("esper, auto, last step",), hosts=("fashion",), seeds=(1,)))
    assert job.method not in {other.method for other in jobs_of(Options())}  # in a table only if it is named
    (job,) = jobs_of(Options(hosts=("fashion",), methods=("plain",), seeds=(1,), examples=20_000, epochs=30))
    assert (job.examples, job.epochs) == (20_000, 30)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(hosts=("mnist",)), "'mnist' is unknown; there are: fashion; cifar; resnet8; gpt; tabular."),
        (Options(methods=("best",)), "'best' is unknown; there are: plain; "),
        (Options(examples=54), "fashion has 54000 examples in batches of 128, not 54."),
    ],
)
def test_what_cannot_be_compared_is_said(options, words, tmp_path, capsys):
    assert main(replace(options, out=tmp_path)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "make"), [("tabular", a_table), ("gpt", a_text)])
def test_esper_counts_a_network_as_the_usual_ways_do(name, make):
    host, data = HOST[name], make()
    budget = 8.0 * budget_of(host, data, 2.0)
    found = esper.grow(task_of(host, data, 2.0), "plain", budget=esper.Budget(flops=budget), progress=False)
    assert found.flops == forward_flops(host, data, 1.0)


def test_a_small_table_is_written_and_not_computed_twice(tmp_path, capsys):
    document = tmp_path / "page.md"
    document.write_text(f"by hand\n{BEGIN}\nold\n{END}\nmore\n")
    options = Options(hosts=("tabular",), seeds=(1,), examples=480, epochs=4.24, out=tmp_path / "out", page=document)
    assert main(options) == 0
    first = (tmp_path / "out" / "results.jsonl").read_text()
    assert len(first.splitlines()) == len(options.methods)
    assert "| plain, long |" in document.read_text()
    assert document.read_text().startswith("by hand\n")
    capsys.readouterr()
    assert main(options) == 0
    assert f"{len(options.methods)} of {len(options.methods)} results" in capsys.readouterr().out
    assert (tmp_path / "out" / "results.jsonl").read_text() == first


def test_in_the_same_time_methods_of_esper_have_the_seconds_of_one_long_run(tmp_path, capsys):
    options = Options(
        hosts=("tabular",), seeds=(1,), examples=4_800, epochs=4.0, out=tmp_path, same_time=True,
        methods=("esper, plain", "plain, long"),
    )  # fmt: skip
    assert main(replace(options, methods=("esper, plain",))) == 2
    assert "in the same time needs the method 'plain, long'; add it." in capsys.readouterr().err
    assert main(options) == 0
    long, grown = stored(tmp_path / "results.jsonl")
    assert (long.method, grown.method) == ("plain, long", "esper, plain")
    assert grown.flops != long.flops
