import doctest
import hashlib
import importlib

import pytest

from kvretain.evidence import split

# Ids as MATH-500 has them, with their MD5 modulo 5, computed with md5sum and bc.
BUCKETS = {
    "test/precalculus/807.json": 0,
    "test/intermediate_algebra/1994.json": 0,
    "test/algebra/2584.json": 4,
    "test/number_theory/572.json": 4,
    "test/prealgebra/1622.json": 0,
    "test/geometry/434.json": 3,
    "test/counting_and_probability/134.json": 3,
    "test/Straße/1.json": 2,
}


def test_known_ids_fall_where_md5_puts_them():
    development, heldout = split(BUCKETS)
    assert development == [name for name, bucket in BUCKETS.items() if bucket in (0, 1)]
    assert heldout == [name for name, bucket in BUCKETS.items() if bucket not in (0, 1)]


@pytest.mark.parametrize("buckets", [2, 3, 10])
def test_a_side_depends_on_nothing_but_the_id(buckets):
    ids = [f"problem {i}" for i in range(200)]
    development, heldout = split(iter(ids), buckets=buckets, development=[buckets - 1])
    assert sorted(development + heldout) == sorted(ids)
    assert [name for name in ids if name in set(development)] == development
    for name in development[:20]:
        assert int(hashlib.md5(name.encode()).hexdigest(), 16) % buckets == buckets - 1
    other = split(ids[::-1][:100], buckets=buckets, development=[buckets - 1])
    assert set(other[0]) <= set(development) and set(other[1]) <= set(heldout)


IDS = [f"{i}" for i in range(50)]


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([*IDS, "3", "7"], {}, ValueError, "2 of them come more than once: '3', '7'"),
        (IDS[:1], {}, ValueError, "side is empty: 1 ids in 5 buckets"),
        ([], {}, ValueError, "the development side is empty"),
        (IDS, {"development": ()}, ValueError, "the development side is empty"),
        (IDS, {"development": range(5)}, ValueError, "the held-out side is empty"),
        (IDS, {"development": (0, 5)}, ValueError, r"development buckets \[5\] do not exist: there are 0 to 4"),
        (IDS, {"development": (-1,)}, ValueError, r"development buckets \[-1\] do not exist"),
        (IDS, {"buckets": 1, "development": (0,)}, ValueError, "at least two"),
        (IDS, {"buckets": 0}, ValueError, "at least two"),
        (IDS, {"buckets": 5.0}, TypeError, "buckets are integers, not 5.0"),
        (IDS, {"buckets": True}, TypeError, "buckets are integers"),
        (IDS, {"development": ("0",)}, TypeError, "buckets are integers, not '0'"),
        ([*IDS, 3], {}, TypeError, r"an id must be a string, not int \(3\)"),
        ("abcdefgh", {}, TypeError, "not one string"),
    ],
)
def test_bad_input(ids, options, error, message):
    with pytest.raises(error, match=message):
        split(ids, **options)


def test_the_examples():
    module = importlib.import_module("kvretain.evidence.splitting")
    assert doctest.testmod(module) == (0, 1)
