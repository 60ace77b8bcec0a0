"""What makes a function of this package an `evaluate` module."""

import datasets
import evaluate


CLASS = datasets.Value("int64")
PAIR = "predictions and references: class indices, as many of the one as of the other"


def evaluate_module(function, inputs: str = PAIR, **features) -> type[evaluate.Metric]:
    """The class that `evaluate.load` looks for in a file.

    Args:
        inputs: what the arguments are.
        features: those arguments of each image that are no class index.
    """
    info = evaluate.MetricInfo(
        description=function.__doc__,
        citation="",
        inputs_description=inputs,
        features=datasets.Features({"predictions": CLASS, "references": CLASS, **features}),
    )
    name = "".join(part.capitalize() for part in function.__name__.split("_"))
    compute = lambda self, **arguments: {function.__name__: function(**arguments)}
    return type(
        name, (evaluate.Metric,), {"__doc__": function.__doc__, "_info": lambda self: info, "_compute": compute}
    )
