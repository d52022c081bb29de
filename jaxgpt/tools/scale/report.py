"""A plan, a prediction and the result of a ladder in words and tables."""

from __future__ import annotations

from typing import Any

from jaxgpt.tools.scale.ladder import MOST_EPOCHS, Plan

WITHIN = 0.01  # relative error of a prediction that holds


def format_plan(plan: Plan) -> str:
    """Return a plan as a table in Markdown."""
    lines = ["| width | parameters | tokens | epochs | FLOPs | minutes |", "|---|---|---|---|---|---|"]
    for x in plan.rungs:
        if x.seed:
            continue
        lines.append(
            f"| {x.width} | {x.parameters:,} | {x.tokens:,} | {x.epochs:.2f} | {x.flops:.2e} | {x.seconds / 60:.1f} |"
        )
    lines.append(f"| test run | | | at most {MOST_EPOCHS} | {plan.test_flops:.2e} | {plan.test_seconds / 60:.1f} |")
    total = (sum(x.seconds for x in plan.rungs) + plan.test_seconds) / 60
    seeds = 1 + max(x.seed for x in plan.rungs)
    return "\n".join([*lines, f"seeds of each run of the ladder: {seeds}; about {total:.0f} minutes in all"])


def format_prediction(prediction: dict[str, Any]) -> str:
    """Return a prediction as a sentence."""
    run = prediction["run"]
    return (
        f"prediction, {prediction['date']}: {prediction['loss']:.4f} ({prediction['low']:.4f} to "
        f"{prediction['high']:.4f}) for width {run['width']}, {run['parameters']:,} parameters and {run['tokens']:,} "
        f"tokens ({run['epochs']:.1f} epochs), {run['flops']:.2e} FLOPs"
    )


def format_scale(found: dict[str, Any]) -> str:
    """Return the result of `run_scale` as a table in Markdown and sentences."""
    law, within = found["law"], found["intervals"]
    lines = ["| width | parameters | tokens | FLOPs | loss | error of the fit |", "|---|---|---|---|---|---|"]
    for x in found["points"]:
        lines.append(
            f"| {x['width']} | {x['parameters']:,} | {x['tokens']:,} | {x['flops']:.2e} | {x['loss']:.4f} | "
            f"{x['relative_error']:+.2%} |"
        )
    exponents = ", ".join(
        f"{name} {value:.3f} ({within[key][0]:.3f} to {within[key][1]:.3f})"
        for name, key, value in (
            ("alpha", "alpha", law["alpha"]),
            ("beta", "beta", law["beta"]),
            ("E", "E", law["E"]),
            ("optimal N ~ C^a, a", "parameters_exponent", found["parameters_exponent"]),
        )
    )
    result = found["result"]
    measured = (
        "the test run diverged"
        if result is None
        else f"measured: {result['loss']:.4f}, {result['relative_error']:+.2%} from the prediction: "
        f"{'within' if result['within'] else 'not within'} {WITHIN:.0%}, "
        f"{'inside' if result['inside_interval'] else 'outside'} the interval"
    )
    fit = f"L = {law['E']:.3f} + {law['A']:.3g} / N^{law['alpha']:.3f} + {law['B']:.3g} / D^{law['beta']:.3f}"
    return "\n".join([*lines, "", f"{fit}; {exponents}", format_prediction(found["prediction"]), measured])
