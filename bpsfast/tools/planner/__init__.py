"""``bpsfast plan``: predicts the time of a training step for given machines and a model (`prediction.make`).

    catalog, model_shapes   the built-in models, and models from files or torch
    machine_list            machines as users write them
    prediction, plan_text   the prediction, and its text
    authors_table           the models table of BytePS's authors, recomputed
"""
