"""The names of metrics and their units."""

from training.metric_names import METRIC_KEYS


def test_every_metric_has_its_unit_in_its_name_or_is_named_in_the_table():
    for key, metric in METRIC_KEYS.items():
        assert metric.description
        if key.endswith("_gib"):
            assert metric.unit.startswith("GiB")
        if key.endswith("_ms"):
            assert metric.unit == "ms"
