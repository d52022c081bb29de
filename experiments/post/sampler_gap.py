"""How far is the log-probability that the engine stores from the trainer's?

Question    The engine computes the log-probability of each token that it draws: one token at a time, from cached keys and
            values, in a batch with others. The trainer computes it from the whole row. For which settings are both equal
            to the bit, and how large is the difference elsewhere?
Reference   vllm#42259 asks for names: "whole" is the log-softmax of the raw logits over the whole vocabulary, and "truncated"
            the logarithm of the distribution that the token was drawn from, after penalties, bias, grammar,
            temperature and filters. trl#6789 has what happens if one program means the first and one the second.
Command     python experiments/post/sampler_gap.py            # a tiny model with random parameters
            python experiments/post/sampler_gap.py RUN        # the model of a run directory
Expected    Written before the first table. What the engine stores is "whole" with every filter, so filters change nothing:
            all cells with float32 have the same difference, below 1e-5, which comes from the order of sums in attention
            and matrix products, and some tokens are equal to the bit. Company, prefix reuse and devices change no bit.
            int8 keys and values are within 0.05, bfloat16 within 0.05, int8 weights within 0.1. "truncated" differs from
            "whole" by the logarithm of the mass that is left: up to 0.11 with top-p 0.9, and by more with top-k.
Result      not yet.
Verdict     not yet.
"""
