"""The dashboard asks for nothing that is not exported, and shows all that is."""

import json
import re
from pathlib import Path

from rose.serving.gateway.metrics import Metrics
from rose.serving.gateway.models import ModelTable
from tests.unit.gateway_stub import StubClient

PATH = Path(__file__).parents[2] / "docs" / "grafana.json"


def exported():
    """Names of the samples that a gateway exports, of metrics with labels too."""
    metrics = Metrics(ModelTable({"m": StubClient()}))
    names = set()
    for family in metrics.registry.collect():
        kinds = {
            "counter": [f"{family.name}_total"],
            "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
        }
        names |= set(kinds.get(family.type, [family.name]))
    return names


def test_every_metric_of_the_dashboard_is_exported_and_the_other_way_round():
    dashboard = json.loads(PATH.read_text())
    asked = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    asked += json.dumps(dashboard["templating"])
    names = set(re.findall(r"\brose_\w+", asked))
    assert names - exported() == set()
    shown = {re.sub("_(bucket|sum|count|total)$", "", name) for name in names}
    assert {re.sub("_(bucket|sum|count|total)$", "", name) for name in exported()} - shown == set()


def test_panels_have_places_of_their_own():
    places = [tuple(panel["gridPos"].values()) for panel in json.loads(PATH.read_text())["panels"]]
    taken = [
        (column, row)
        for x, y, w, h in places
        for column in range(x, x + w)
        for row in range(y, y + h)
    ]
    assert len(taken) == len(set(taken))
    assert max(column for column, _ in taken) < 24
