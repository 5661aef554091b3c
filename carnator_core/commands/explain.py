"""What is known of a request before its run: reads the bank, calls no model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..bank import EntryInfo, entry_id
from ..console import plain, print_table
from ..gate.choose import CANDIDATES
from ..gate.decide import schedules_differ
from ..mini import sample
from ..pipelines import Generator
from ..request import Request, same_noise
from ..reuse.plan import plan_of
from ..schedule import probe_steps


def explain(generator: Generator, prompt: str, seed: int, size: int, steps: int) -> dict[str, Any]:
    """Plain data: the request's digests, an exact entry, the nearest donors, the probe, the deepest plan."""
    noise, levels = sample.noise([seed], size), sample.sigmas(steps)
    request = generator.request(prompt, seed, noise, levels)
    bank, policy = generator.bank, generator.policy
    plan = plan_of(policy, levels[:-1].tolist(), probe_steps(steps))
    lenders = bank.recall(request, CANDIDATES, only_same_noise=True) or bank.recall(request, CANDIDATES)
    donors = [_donor(request, info) for info in lenders]
    return {
        "prompt": prompt,
        "seed": seed,
        "request": entry_id(request),
        "identity": request.identity.digest,
        "exact": bank.exact(request) is not None,
        "donors": donors,
        "no_donors": "" if donors else bank.explain_empty(request),
        "probe": probe_steps(steps),
        "steps": steps,
        "policy": asdict(policy),
        "plan": str(plan),
        "forwards": plan.forwards,
        "regions": len(plan.region),
        "warnings": list(bank.warnings),
    }


def _donor(request: Request, info: EntryInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "prompt": info.prompt,
        "seed": info.seed,
        "similarity": round(info.similarity, 4) if info.similarity is not None else None,
        "same_noise": same_noise(info.noise, request.profile.noise),
        "schedule": schedules_differ(request.profile, info.prediction_sigmas) or "fits",
    }


def print_explanation(found: dict[str, Any]) -> None:
    policy, steps = found["policy"], found["steps"]
    print(f"request   {found['request']}")
    print(f"identity  {found['identity']}")
    if found["exact"]:
        print("exact     yes: its stored result would be returned, no step computed")
        return
    print("exact     no, this request is not in the bank")
    print(
        f"probe     the first {found['probe']} of {steps} steps are computed, then the gate judges the nearest donors"
    )
    print(
        f"policy    {policy['name']}: accepts a risk up to {policy['threshold']:.2f}; the risk is known after the probe"
    )
    full, regions = found["forwards"] - found["regions"], found["regions"]
    if full < steps:
        within = f", {regions} in the changed region (o)" if regions else ""
        print(f"plan      {found['plan']}")
        print(f"          of a joint hit: {full} of {steps} steps computed (#){within}, the others answered (.);")
        print(
            f"          where answers are off by more than {policy['tolerance']:.0%} more is computed, after a miss all"
        )
    else:
        print(f"plan      {steps} steps are too few to skip any")
    if not found["donors"]:
        print(f"donors    none: {found['no_donors']}")
        return
    print("donors    the nearest by text, of the same identity; only one with the same noise can lend predictions,")
    print("          so others are listed only where there is none")
    rows = [
        (
            donor["id"][:8],
            "" if donor["similarity"] is None else f"{donor['similarity']:.3f}",
            "same" if donor["same_noise"] else f"other (seed {donor['seed']})",
            plain(donor["schedule"], 40),
            plain(donor["prompt"], 70),
        )
        for donor in found["donors"]
    ]
    print_table(("id", "similar", "noise", "schedule", "prompt"), rows)
