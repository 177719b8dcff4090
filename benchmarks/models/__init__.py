"""Every quantity on the models that people train: ``python -m benchmarks.models``.

``trial`` says what a model to try is, ``plain``, ``text``, ``vision``, ``adapters`` and
``packages`` list them, ``oracle`` computes what is right by plain autograd, ``judge`` compares,
``page`` writes the table.
"""
