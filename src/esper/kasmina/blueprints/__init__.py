"""Blueprints: the networks that can grow in a slot."""

from esper.kasmina.blueprints.cnn import CNN_BLUEPRINTS
from esper.kasmina.blueprints.layers import GateNetwork as GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint as AbstractBlueprint
from esper.kasmina.blueprints.registry import blueprint_at as blueprint_at
from esper.kasmina.blueprints.registry import blueprint_by_name as blueprint_by_name
from esper.kasmina.blueprints.registry import names as names
from esper.kasmina.blueprints.registry import num_blueprints as num_blueprints
from esper.kasmina.blueprints.registry import register as register
from esper.kasmina.blueprints.registry import register_builtin
from esper.kasmina.blueprints.registry import selectable as selectable
from esper.kasmina.blueprints.registry import unregister as unregister
from esper.kasmina.blueprints.transformer import TRANSFORMER_BLUEPRINTS

for _blueprint in (*CNN_BLUEPRINTS, *TRANSFORMER_BLUEPRINTS):
    register_builtin(_blueprint)
