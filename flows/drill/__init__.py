"""The fire drill: a real run is broken on purpose, in every way that it has to survive.

``arena`` is the run under fire and what can be seen of it; ``faults`` has what is done to it, a function each;
``exercise`` does one after another and compares with a run that nobody disturbs. Faults come from outside, by signals
and by damage to files: nothing in the trainer knows that it is drilled.
"""
