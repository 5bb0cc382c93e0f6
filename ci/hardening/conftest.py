"""The numbers of examples for the fuzzers: `--hypothesis-profile=quick` or `long`."""

from hypothesis import HealthCheck, settings

for name, examples in {"quick": 80, "long": 3_000}.items():
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
