"""Twelve sentences for the demo: four topics, three sentences each, 3 to 60 words, so that a batch has much padding."""

from __future__ import annotations

SENTENCES: tuple[tuple[str, str], ...] = (
    ("tides", "The tide turned."),
    ("bread", "Let the dough rise in a warm place until it has doubled in size."),
    ("orbits", "A comet's tail always points away from the sun."),
    (
        "trains",
        (
            "The night train to the coast was more than forty minutes late, so we sat on our suitcases at the end of "
            "the platform, drank bad coffee from paper cups, and watched the signal lights change from red to green "
            "and back to red again while the loudspeaker apologised, in three languages, for a delay that it never "
            "once explained."
        ),
    ),
    (
        "tides",
        (
            "Twice a day the sea climbs the beach and draws back again, because the moon pulls at the water on the "
            "near side of the earth a little harder than it pulls at the earth itself."
        ),
    ),
    ("bread", "Rye flour holds more water than wheat, so the loaf stays moist for days."),
    ("trains", "All trains stop here."),
    (
        "orbits",
        (
            "Kepler noticed that a planet moves faster when it is close to the sun and slower when it is far away, and "
            "that a line drawn from one to the other sweeps over equal areas in equal times."
        ),
    ),
    ("bread", "Bake the bread."),
    (
        "tides",
        "At low water the boats in the harbour lie on the mud, and nobody can leave before the flood tide lifts them.",
    ),
    ("trains", "The express does not call at small stations; change to the local railway line at the junction."),
    (
        "orbits",
        "Four moons circle the planet Jupiter, as the planets circle the sun, and good binoculars show all of them.",
    ),
)
"""(topic, sentence)."""
