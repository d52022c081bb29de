"""Improve one file overnight by edits that a command proposes, and keep none of them by chance.

Question    "Keep the edit if its loss is lower" keeps seeds. How often does a night keep an edit that is no better, and which
            gains does it miss, if each edit is trained beside its base until an always-valid test has an answer?
Reference   github.com/karpathy/autoresearch: a change of the seed was kept (issues 466, 131 and 278), and a floor of noise
            was proposed, twice the difference of two runs of the base (pull request 560). The test is Lai 1976, Annals of
            Statistics 4, 265-280, in the form of Wang and Ramdas 2024, arXiv:2310.03722, section 4; invariance is
            Perez-Ortiz et al. 2024, arXiv:2208.07610. Errors are shared as in Tian and Ramdas 2021, arXiv:1910.04900.
Test        x is a difference of losses, edit minus base with the same seed, plus LEAST. If x is normal with mean 0 and any
            deviation, then T_n = sum x / sqrt(sum x^2) has a distribution without unknowns, and so has the likelihood ratio
            of T_1 ... T_n when the mean is -|z| SPREAD deviations, z normal, against 0. That is a martingale of mean 1, which
            exceeds 1 / level at any time with probability at most `level` (Ville 1939). It falls as T rises, and T rises if
            the same number is added to all x. So a mean above 0 only makes it smaller: no better, and worse, are covered.
            Giving up early makes acceptance rarer and cannot hurt.
Night       An edit is tested at what is left of 5%, divided by the number of proposals still to come. What is given up has
            spent its level, and what is accepted gets it back. Until the first false acceptance all levels of edits that are
            no better are spent, and none is more than what is left, so that they sum to at most 5%. Each proposal has new
            seeds, for its base too: otherwise a proposer could learn from the history which seeds flatter its edits.
Command     python experiments/autoresearch/night.py NIGHT --text shakespeare.txt --proposer "COMMAND"
            Or, with the built-in mutator of fields in the proposer's place: --over optim.beta2=0.9..0.99 --over ...
            --on local:2 or --on ray trains both runs of a pair at once. The same command resumes.
Expected    see `measure.py`.
Result      see `measure.py`.
Verdict     see `measure.py`.
"""
