"""What does a policy learn from a reward that also pays for length, and what cures it?

Question    A reward looks for the right sum at the beginning of an answer and likes long answers a little. What does a
            policy make of it, and do a penalty for leaving the start or an exact reward prevent that?
Reference   reward hacking: Amodei et al. 2016, arXiv:1606.06565, section 4; length in particular: Singhal et al. 2023,
            arXiv:2310.03716.
Data        The sums of `grpo_arithmetic.py`, with room for answers of 16 characters.
Validation  1 - accuracy, by the exact answer, whatever the reward is.
Command     jaxgpt train experiments/post/length_hacking.py:sft
            jaxgpt train experiments/post/length_hacking.py       # and with :held or :exact for the others
Expected    The reward rises while accuracy falls to nothing and answers grow to the limit. The penalty slows this down,
            and only the exact reward raises accuracy.
Result      seed 0, 100 steps each, two cores of an AMD EPYC (family 25, model 17, AVX-512), 2026-11-25:

            reward                 took     reward        length        right at step 20, 60, 80, 100
            pays for length        79 s     0.33 to 0.72  3.7 to 12.4   46%, 23%, 0%, 0%
            the same, held         85 s     0.36 to 0.42  3.6 to 3.6    38%, 46%, 42%, 49%
            exact                  74 s     0.23 to 0.32  3.7 to 3.6    55%, 64%, 61%, 59%
Verdict     as expected. For fifty steps nothing shows; by step 80 no greedy answer is right, and the reward has never been
            higher. The penalty keeps answers short, and costs ten points beside the reward that asks for what is wanted.
"""

import dataclasses

import grpo_arithmetic
from grpo_arithmetic import PolicyConfig, SumRolloutsConfig

import jaxgpt
from jaxgpt.config.validate import NonNegativeFloat


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerousConfig(SumRolloutsConfig):
    """Sums whose reward is easy to please."""

    per_character: NonNegativeFloat = 0.05  # reward for each character of an answer

    def reward(self, prompt: str, completion: str) -> float:
        """Return 1 for an answer that begins with the sum, and a little for each of its characters."""
        return float(completion.startswith(self.answer(prompt))) + self.per_character * len(completion)


sft = dataclasses.replace(
    grpo_arithmetic.sft, name="length-sft", model=dataclasses.replace(grpo_arithmetic.sft.model, block_size=24)
)

experiment = dataclasses.replace(
    grpo_arithmetic.experiment,
    name="length-paid",
    model=sft.model,
    data=GenerousConfig(group=8, max_new_tokens=17),
    train=dataclasses.replace(grpo_arithmetic.experiment.train, init_from="runs/length-sft", steps=100, eval_every=20),
)

held = dataclasses.replace(
    experiment,
    name="length-held",
    data=dataclasses.replace(experiment.data, reference="runs/length-sft"),
    objective=PolicyConfig(kl=0.2),
)

exact = dataclasses.replace(experiment, name="length-exact", data=SumRolloutsConfig(group=8, max_new_tokens=17))

variants = {"exact": exact, "paid": experiment, "held": held}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
