"""Count what nights of autoresearch keep by chance, and what they miss, under four rules.

Question    Of nights with 20 edits that change nothing and two true ones, how many keep an edit that changes nothing? Which
            true gains are kept, and what does each rule cost in runs?
Reference   see `night.py`. Runs are those of `../laptop/run.py`: 603 of one configuration, whose seeds stand for edits that
            change nothing, and 20 pairs of each of 13 ideas and of three optimisers, 384,120 parameters.
Rules       greedy     one run of each edit, kept if it is below the last one that was kept
            averaged   the same with the mean of as many runs as the night needs for each proposal, rounded up
            floor      one run, kept if it is below the last kept by twice the difference of two runs of the first base
            night      `night.py`: at most 16 pairs, 5% a night, a least gain of 0.001
Nights      Ten lists have 20 of the 200 null edits each and two of 20 planted true edits; a night draws its runs from the
            records with replacement, null edits without pairing, true ones by pairs. True edits are the ideas and optimisers
            of the laptop's study that differ by more than 0.003, in the direction that helps. Effects add. Deviations of a
            pair are 0.006 to 0.016.
Command     python experiments/autoresearch/measure.py
Expected    Written before the first draw from the records; the number of pairs and SPREAD were chosen on normal draws.
            Greedy keeps an edit that changes nothing in 90% to 97% of nights, averaged in 85% to 97%, the floor in 40% to
            70%, and the night in 0.5% to 3%: the bound is 5%, and it gives edits up early. Of true gains of 0.02 and more the
            night keeps at least 85%, of 0.01 to 0.02 it keeps 20% to 60%, and below 0.01 less than 15%. Greedy keeps 60% to
            85%, 35% to 60% and 15% to 35%; averaged 90% and more, 60% to 90% and 25% to 50%; the floor 45% to 80%, 15% to 45%
            and 5% to 20%. A night takes 120 to 180 runs, which is 5 to 8 for each proposal.
            Real nights: none of the null edits is kept, and both planted edits of 0.03 or more are.
Result      not run yet.
Verdict     none yet.
"""
