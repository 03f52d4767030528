import torch

from kvretain.zscores import standardised


def test_each_row_over_its_candidates_alone():
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 7 + 3
    candidates = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    scores[~candidates] = torch.nan  # never read
    found = standardised(scores, candidates)
    for row, own in zip(found.flatten(0, 1), candidates.flatten(0, 1), strict=True):
        assert abs(float(row[own].mean())) < 1e-6 and abs(float(row[own].std(correction=0)) - 1) < 1e-5
        assert not row[~own].any()


def test_equal_scores_and_no_candidate_are_zero():
    scores = torch.full((2, 4), 5.0)
    assert not standardised(scores, torch.tensor([[True] * 4, [False] * 4])).any()
