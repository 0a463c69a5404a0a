"""From the jaxpr of a whole step to a flat list of executables to run.

``program`` opens calls until every region's call is an equation of one flat list; ``partition``
groups the rest into glue and names every part by its canonical form; ``schedule`` decides when
buffers die and who may take them over, and runs the list.
"""
