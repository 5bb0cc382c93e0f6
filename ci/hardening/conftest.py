"""The numbers of examples for the fuzzers: `--hypothesis-profile=some`, for example."""

from hypothesis import HealthCheck, settings

for name, examples in {"few": 10, "some": 80, "more": 600, "many": 3_000}.items():
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
