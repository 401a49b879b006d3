"""MovieTweetings, snapshot 100K: real ratings with timestamps (Dooms, De Pessemier and Martens, CrowdRec 2013).

The label is rating >= 8. Rows are sorted by time: the first 80 % are for training, the rest for testing. Vocabularies
and label averages come from training rows only: a training row sees the rows before it, a test row all training rows.
Counts of a user's and a movie's ratings include all earlier rows.

The data is not part of the package. It is read from the folder LOKA_DATA (or its subfolder movietweetings-100k), else
from shared/data/movietweetings-100k beside the repository that contains the current directory.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loka.errors import InputError

Batch = tuple[tuple[Tensor, Tensor], Tensor]

NAME = "movietweetings-100k"
POSITIVE = 8  # the least rating that counts as a click
TRAIN_SHARE = 0.8
GENRES = 24  # rows of a genre table; 0 is "none"

FIELDS = (
    "user", "movie", "age", "genre_1", "genre_2", "genre_3", "genres", "hour", "weekday", "user_seen", "movie_seen",
)  # fmt: skip
ROWS = (8192, 5120, 16, GENRES, GENRES, GENRES, 512, 24, 7, 12, 12)  # of each field's embedding table
# Counts are only bucketed: as dense features they would leave the training range, where seeds extrapolate differently.
DENSE_FIELDS = ("user_liking", "movie_liking", "genres_liking")
DENSE = len(DENSE_FIELDS)
PRIOR_WEIGHT = 3.0  # pseudo-ratings at 50 % in every running average

HOW_TO_GET = (
    "download snapshots/100K (ratings.dat and movies.dat) of https://github.com/sidooms/MovieTweetings and set "
    "LOKA_DATA to the folder that holds them"
)


@dataclass(frozen=True, slots=True)
class Split:
    """Rows in time order: dense (R, DENSE) float32, ids (R, len(FIELDS)) int64, label (R,) float32, time (R,) s."""

    dense: Tensor
    ids: Tensor
    label: Tensor
    time: Tensor

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True)
class _Rating:
    user: int
    movie: int
    liked: bool
    time: int  # unix seconds


@dataclass(frozen=True, slots=True)
class _Movie:
    year: int
    genres: tuple[str, ...]


class RatingBatches:
    """A split as batches ((dense, ids), target), in an order drawn from `seed`, or in time order for None."""

    def __init__(self, split: Split, batch_size: int, seed: int | None) -> None:
        if batch_size < 1:
            raise InputError(f"MovieTweetings: batch_size must be at least 1, not {batch_size}")
        self.split, self.batch_size, self.seed = split, batch_size, seed
        self.samples = len(split)

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.arange(self.samples)
        if self.seed is not None:
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed))
        for rows in torch.split(order, self.batch_size):
            yield (self.split.dense[rows], self.split.ids[rows]), self.split.label[rows]


def find_data() -> Path:
    """The folder with ratings.dat and movies.dat. Raises InputError, with download advice, if there is none."""
    named = os.environ.get("LOKA_DATA")
    if named:
        candidates = [Path(named), Path(named) / NAME]
    else:
        candidates = [_repository(Path.cwd()).parent / "shared" / "data" / NAME]
    for folder in candidates:
        if all((folder / file).is_file() for file in ("ratings.dat", "movies.dat")):
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise InputError(f"MovieTweetings: no ratings.dat and movies.dat in {looked}: {HOW_TO_GET}")


@lru_cache(maxsize=1)
def load(folder: Path) -> tuple[Split, Split]:
    """The training and the test split. Raises InputError for a line that does not parse."""
    ratings = sorted(_read_ratings(folder / "ratings.dat"), key=lambda rating: (rating.time, rating.user, rating.movie))
    movies = _read_movies(folder / "movies.dat")
    missing = next((rating.movie for rating in ratings if rating.movie not in movies), None)
    if missing is not None:
        raise InputError(f"MovieTweetings: movie {missing} is rated but not in {folder / 'movies.dat'}: {HOW_TO_GET}")
    if not ratings:
        raise InputError(f"MovieTweetings: no rows in {folder / 'ratings.dat'}: {HOW_TO_GET}")
    cut = int(len(ratings) * TRAIN_SHARE)
    dense, ids = _features(ratings, movies, cut)
    label = torch.tensor([float(rating.liked) for rating in ratings])
    time = torch.tensor([rating.time for rating in ratings])
    train = Split(torch.from_numpy(dense[:cut]), torch.from_numpy(ids[:cut]), label[:cut], time[:cut])
    test = Split(torch.from_numpy(dense[cut:]), torch.from_numpy(ids[cut:]), label[cut:], time[cut:])
    return train, test


class _Liking:
    """Number of rows of each key, and the share of them that was liked."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._surplus: Counter[Hashable] = Counter()  # liked minus disliked

    def add(self, key: Hashable, liked: bool) -> None:
        self._seen[key] += 1
        self._surplus[key] += 1 if liked else -1

    def share(self, key: Hashable) -> float:
        """From -1 (all disliked) to 1 (all liked), shrunk towards 0 for few rows."""
        return self._surplus[key] / (self._seen[key] + PRIOR_WEIGHT)


def _features(
    ratings: Sequence[_Rating], movies: dict[int, _Movie], cut: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Dense features and ids of every row; labels of rows from `cut` on are never read."""
    train = ratings[:cut]
    user_ids = _vocabulary((rating.user for rating in train), ROWS[0], least=2)
    movie_ids = _vocabulary((rating.movie for rating in train), ROWS[1], least=2)
    genre_ids = _vocabulary((genre for rating in train for genre in movies[rating.movie].genres), GENRES, least=1)
    set_ids = _vocabulary((movies[rating.movie].genres for rating in train), ROWS[6], least=2)
    users, films, sets = _Liking(), _Liking(), _Liking()
    user_rows: Counter[int] = Counter()
    film_rows: Counter[int] = Counter()
    dense = np.empty((len(ratings), DENSE), dtype=np.float32)
    ids = np.empty((len(ratings), len(FIELDS)), dtype=np.int64)
    for row, rating in enumerate(ratings):
        movie = movies[rating.movie]
        when = datetime.fromtimestamp(rating.time, UTC)
        age = max(when.year - movie.year, 0)
        dense[row] = (
            users.share(rating.user), films.share(rating.movie), sets.share(movie.genres),
        )  # fmt: skip
        genres = [genre_ids.get(genre, 0) for genre in movie.genres[:3]]
        ids[row] = (
            user_ids.get(rating.user, 0), movie_ids.get(rating.movie, 0), _bucket(age, ROWS[2]),
            *genres, *[0] * (3 - len(genres)), set_ids.get(movie.genres, 0),
            when.hour, when.weekday(),
            _bucket(user_rows[rating.user], ROWS[9]), _bucket(film_rows[rating.movie], ROWS[10]),
        )  # fmt: skip
        user_rows[rating.user] += 1  # counts include test rows; labels are read from training rows only
        film_rows[rating.movie] += 1
        if row < cut:
            users.add(rating.user, rating.liked)
            films.add(rating.movie, rating.liked)
            sets.add(movie.genres, rating.liked)
    return dense, ids


def _vocabulary(keys: Iterator[Hashable], rows: int, least: int) -> dict[Hashable, int]:
    """Ids from 1, most frequent key first; 0 is for keys seen less than `least` times or beyond `rows`."""
    counted = Counter(keys)
    frequent = sorted((key for key in counted if counted[key] >= least), key=lambda key: (-counted[key], str(key)))
    return {key: i for i, key in enumerate(frequent[: rows - 1], start=1)}


def _bucket(count: int, buckets: int) -> int:
    """Bucket of a count: 0, 1, 2, 3-4, 5-8, ...; the last bucket is open."""
    return min(count if count < 3 else (count - 1).bit_length() + 1, buckets - 1)


def _read_ratings(path: Path) -> list[_Rating]:
    ratings = []
    for place, (user, movie, rating, time) in _records(path, 4):
        try:
            ratings.append(_Rating(int(user), int(movie), int(rating) >= POSITIVE, int(time)))
        except ValueError:
            raise InputError(f"{place}: not four whole numbers user::movie::rating::time: {HOW_TO_GET}") from None
    return ratings


def _read_movies(path: Path) -> dict[int, _Movie]:
    movies = {}
    for place, (movie, title, genres) in _records(path, 3):
        year = re.search(r"\((\d{4})\)$", title)
        if not movie.isdecimal() or year is None:
            raise InputError(f"{place}: not id::title (year)::genre|genre: {HOW_TO_GET}")
        movies[int(movie)] = _Movie(int(year[1]), tuple(genre for genre in genres.split("|") if genre))
    return movies


def _records(path: Path, fields: int) -> Iterator[tuple[str, list[str]]]:
    """(file:line, fields) of every line. Raises InputError for another number of fields."""
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                record = line.rstrip("\n").split("::")
                if len(record) != fields:
                    raise InputError(f"{path}:{number}: {len(record)} fields, not {fields}: {HOW_TO_GET}")
                yield f"{path}:{number}", record
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text: {HOW_TO_GET}") from None


def _repository(folder: Path) -> Path:
    """The nearest repository root at or above `folder`; without one, `folder` itself."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), folder)
