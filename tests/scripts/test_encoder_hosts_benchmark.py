"""The benchmark of users' encoders, with two hosts of a few tokens."""

from encoder_hosts import Options, main


def test_every_batch_and_dropout_is_measured(capsys):
    main(Options(hosts=2, layers=1, width=8, context=4, batch=(2,), dropout=(0.0, 0.1), batches=1, repetitions=1))
    out = capsys.readouterr().out
    assert out.count("2 x 4 tokens, 1 layers of 8, batch 2") == 2
