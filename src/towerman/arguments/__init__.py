"""From what the model wrote to checked keyword arguments; and the one wrapper of the schema validator.

Theory. Arguments come as JSON text or as a mapping. First they are loaded: size, depth, names and
numbers are bounded, and anything that is not exactly one JSON object is refused, never repaired. Then they are
checked, by pydantic against the handler's signature or by jsonschema-rs against a JSON schema. What comes out is a
fresh dictionary of keyword arguments with the defaults filled in.

Eight files: `contract` is what every checker promises; `loading` reads what came in; `subschemas` finds the parts of
a JSON schema; `telling` puts refusals into words; `functions` reads a handler's signature and docstring; `signatures`
and `schemas` are the two checkers; `identity` tells which checked arguments are the same.

House rules. A refusal is written for the model: it names the argument and what it must be. It is put together from
the schema and from positions only. No value, no name that is not in the schema and no text of a validator's
exception goes into it, so there is nothing to leak. Validators are compiled once. pydantic, jsonschema_rs and
griffe are imported on first use.

Not here: placeholders and references (plan), what a call touches (access), the codes of results (runner).
"""

from towerman.arguments.contract import (
    MAX_ARGUMENT_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_SCHEMA_BYTES,
    ArgumentsRefused,
    Checker,
)
from towerman.arguments.functions import context_parameter_of, description_of
from towerman.arguments.identity import identity, mark
from towerman.arguments.loading import frozen, load_arguments
from towerman.arguments.schemas import checker_from_schema
from towerman.arguments.signatures import checker_from_function
from towerman.arguments.subschemas import parameters_of
from towerman.arguments.telling import near_names

__all__ = [
    "MAX_ARGUMENT_BYTES",
    "MAX_DEPTH",
    "MAX_DIGITS",
    "MAX_SCHEMA_BYTES",
    "ArgumentsRefused",
    "Checker",
    "checker_from_function",
    "checker_from_schema",
    "context_parameter_of",
    "description_of",
    "frozen",
    "identity",
    "mark",
    "load_arguments",
    "near_names",
    "parameters_of",
]
