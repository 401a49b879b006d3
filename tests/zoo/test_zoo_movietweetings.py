"""MovieTweetings: the split, no test label in any feature, clear errors. The real data is read where there is some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loka import zoo
from loka.errors import InputError
from loka.zoo import movietweetings
from loka.zoo.movietweetings import DENSE, FIELDS, ROWS, Split, find_data, load

MOVIES = """\
0000001::First Film (1999)::Drama|War
0000002::Second: The Film (2012)::Comedy
0000003::Nameless Genre (2013)::
"""


def write(folder: Path, ratings: list[tuple[int, int, int, int]], movies: str = MOVIES) -> Path:
    lines = [f"{user}::{movie:07d}::{rating}::{time}\n" for user, movie, rating, time in ratings]
    (folder / "ratings.dat").write_text("".join(lines), encoding="utf-8")
    (folder / "movies.dat").write_text(movies, encoding="utf-8")
    load.cache_clear()
    return folder


RATINGS = [(1 + i % 3, 1 + i % 2, 5 + i % 6, 1_362_062_307 + 7200 * i) for i in range(20)]


def test_the_first_eighty_percent_by_time_train(tmp_path: Path) -> None:
    train, test = load(write(tmp_path, list(reversed(RATINGS))))
    assert (len(train), len(test)) == (16, 4)
    assert int(train.time.max()) < int(test.time.min())
    assert train.label.tolist() == [float(rating >= 8) for _, _, rating, _ in RATINGS[:16]]


def test_no_feature_depends_on_a_label_of_a_test_row_or_on_a_later_one(tmp_path: Path) -> None:
    train, test = load(write(tmp_path, RATINGS))
    other = [(u, m, r if i < 16 else 15 - r, t) for i, (u, m, r, t) in enumerate(RATINGS)]
    train_again, test_again = load(write(tmp_path, other))
    assert torch.equal(train.dense, train_again.dense)
    assert torch.equal(test.dense, test_again.dense)
    assert torch.equal(test.ids, test_again.ids)
    assert not torch.equal(test.label, test_again.label)
    for row in range(16):  # a row's own label, and all after it
        changed = [(u, m, r if i < row else 13 - r, t) for i, (u, m, r, t) in enumerate(RATINGS)]
        again, _ = load(write(tmp_path, changed))
        assert torch.equal(again.dense[: row + 1], train.dense[: row + 1])


def test_likings_count_what_came_before(tmp_path: Path) -> None:
    ratings = [(1, 1, 9, 1_362_062_307 + i) for i in range(10)]
    train, test = load(write(tmp_path, ratings))
    liking = [i / (i + movietweetings.PRIOR_WEIGHT) for i in range(9)]
    assert train.dense[:, 0].tolist() == pytest.approx(liking[:8], abs=1e-6)
    assert test.dense[:, 0].tolist() == pytest.approx([liking[8]] * 2, abs=1e-6)


def test_counts_go_on_through_the_test_rows(tmp_path: Path) -> None:
    ratings = [(1, 1, 9, 1_362_062_307 + i) for i in range(10)]
    _, test = load(write(tmp_path, ratings))
    more = [(1, 1, 9, 1_362_062_307 + i) for i in range(20)]
    _, later = load(write(tmp_path, more))
    seen = FIELDS.index("user_seen")
    assert test.ids[:, seen].tolist() == [4, 5]  # 8 and 9 rows before: the buckets of 5 to 8 and of 9 to 16
    assert later.ids[:, seen].tolist() == [5, 6, 6, 6]


def test_who_was_never_seen_in_training_has_id_zero(tmp_path: Path) -> None:
    ratings = [*RATINGS[:16], *((99, 3, 7, 1_400_000_000 + i) for i in range(4))]
    train, test = load(write(tmp_path, ratings))
    assert test.ids[:, :2].tolist() == [[0, 0]] * 4
    assert int(train.ids[:, :2].min()) > 0


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ratings.dat", "1::2::3\n", "ratings.dat:1: 3 fields, not 4"),
        ("ratings.dat", "1::1::8::1362062307\n1::1::eight::1362062307\n", "ratings.dat:2: not four whole numbers"),
        ("ratings.dat", "1::77::8::1362062307\n", "movie 77 is rated but not in"),
        ("movies.dat", "1::No year::Drama\n", "movies.dat:1: not id::title"),
        ("movies.dat", "x::Film (1999)::Drama\n", "movies.dat:1: not id::title"),
        ("ratings.dat", "", "no rows"),
    ],
)
def test_lines_that_do_not_parse_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    write(tmp_path, RATINGS)
    (tmp_path / file).write_text(text, encoding="utf-8")
    load.cache_clear()
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path)
    assert "sidooms/MovieTweetings" in str(caught.value)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    write(tmp_path, RATINGS)
    (tmp_path / "movies.dat").write_bytes(b"1::Fant\xe4sie (1999)::Drama\n")
    with pytest.raises(InputError, match="not UTF-8"):
        load(tmp_path)


def test_missing_data_says_where_it_looked_and_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKA_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"(?s)nowhere.*sidooms/MovieTweetings.*LOKA_DATA"):
        zoo.movietweetings_batches(16, 0)


@pytest.mark.parametrize("below", ["", movietweetings.NAME])
def test_loka_data_names_the_folder_or_the_one_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    folder = write(tmp_path / below, RATINGS)
    monkeypatch.setenv("LOKA_DATA", str(tmp_path))
    assert find_data() == folder
    assert len(zoo.movietweetings_batches(5, 0)) == 4


def test_without_loka_data_it_is_looked_for_beside_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared" / "data" / movietweetings.NAME
    folder.mkdir(parents=True)
    write(folder, RATINGS)
    inside = tmp_path / "checkout" / "deep"
    inside.mkdir(parents=True)
    (tmp_path / "checkout" / ".git").mkdir()
    monkeypatch.delenv("LOKA_DATA", raising=False)
    monkeypatch.chdir(inside)
    assert find_data() == folder


def test_training_order_follows_the_seed_and_the_test_order_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKA_DATA", str(write(tmp_path, RATINGS)))
    _, test = load(tmp_path)
    orders = [torch.cat([inputs[0] for inputs, _ in zoo.movietweetings_batches(5, seed)]) for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert [len(target) for _, target in zoo.movietweetings_batches(5, 0)] == [5, 5, 5, 1]
    tested = torch.cat([target for _, target in zoo.movietweetings_test_batches(3, 1)])
    assert torch.equal(tested, test.label)
    with pytest.raises(InputError, match="batch_size"):
        zoo.movietweetings_batches(0, 0)


@pytest.fixture(scope="module")
def real() -> tuple[Split, Split]:
    try:
        return load(find_data())
    except InputError as error:
        pytest.skip(f"the data is not part of the project: {error}")


@pytest.mark.slow
def test_the_real_snapshot_is_whole(real: tuple[Split, Split]) -> None:
    train, test = real
    assert (len(train), len(test)) == (80_000, 20_000)
    positive = (float(train.label.sum()) + float(test.label.sum())) / 100_000
    assert positive == pytest.approx(0.505, abs=5e-4)
    assert int(train.time.max()) <= int(test.time.min())


def test_real_ids_fit_their_tables_and_features_are_finite(real: tuple[Split, Split]) -> None:
    for split in real:
        assert split.ids.shape[1] == len(FIELDS) == len(ROWS)
        assert split.dense.shape[1] == DENSE
        assert bool((split.ids >= 0).all())
        assert bool((split.ids.max(0).values < torch.tensor(ROWS)).all())
        assert bool(split.dense.isfinite().all())


@pytest.mark.slow
def test_the_model_learns_from_the_real_snapshot(real: tuple[Split, Split]) -> None:
    from loka.bench.quality.training import build, train
    from loka.bench.quality.training_job import TrainingJob

    assert len(real[0]) == 80_000
    job = TrainingJob(
        zoo.movietweetings_ranker, zoo.movietweetings_batches, zoo.movietweetings_test_batches, zoo.click_loss,
        batch_size=256, learning_rate=1e-3, ema=0.99, steps=150,
    )  # fmt: skip
    result = train(build(job, 0), job, seed=0)
    assert result.ne < 0.93
    assert result.auc > 0.7
