"""The Grafana dashboard asks for metrics that exist, and shows all of them."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "k8s" / "grafana-dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def emitted() -> set[str]:
    """Names of all metrics, with Ray's prefix; the tables in metrics.py give some by suffix."""
    source = (ROOT / "deployments" / "metrics.py").read_text()
    names = set(re.findall(r'"(outrider_\w+)"', source))
    by_draft, gauges = source.split("self._by_draft")[1], source.split("self._gauges")[1]
    names |= {f"outrider_{each}_total" for each in _keys(by_draft)}
    names |= {f"outrider_{each}" for each in _keys(gauges)}
    return {f"ray_{name}" for name in names}


def _keys(table: str) -> list[str]:
    return re.findall(r'^ +"(\w+)": "', table.split(".items()")[0], re.MULTILINE)


def asked() -> set[str]:
    names = {name for query in QUERIES for name in re.findall(r"ray_outrider_\w+", query)}
    return {name.removesuffix("_bucket") for name in names}


def test_every_metric_asked_for_exists() -> None:
    assert len(emitted()) > 15
    assert asked() - emitted() == set()


def test_every_metric_is_shown() -> None:
    # Drafted, recovered and bonus tokens and the cache's size are there for queries of one's own.
    left_out = {"drafted_tokens_total", "recovered_tokens_total", "bonus_tokens_total"}
    left_out |= {"router_cache_entries"}

    assert emitted() - asked() == {f"ray_outrider_{name}" for name in left_out}


def test_no_query_divides_by_zero_on_an_idle_server() -> None:
    for query in QUERIES:
        for divisor in query.split(" / ")[1:]:
            assert divisor.endswith("> 0)"), query


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)
