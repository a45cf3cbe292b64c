"""The closed world of the built-in model: all tables of facts that its training text is made from.

The tables are deliberately small and uncontroversial. Nothing is computed here; `corpus.py` turns the entries into
questions, answers, sentences and stories.
"""

from __future__ import annotations

CAPITALS: dict[str, str] = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Estonia": "Tallinn",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Lithuania": "Vilnius",
    "Mexico": "Mexico City",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Scotland": "Edinburgh",
    "Serbia": "Belgrade",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "Uruguay": "Montevideo",
    "Vietnam": "Hanoi",
    "Wales": "Cardiff",
}

CITIES: tuple[str, ...] = tuple(CAPITALS.values())

# (things counted, container, how many)
UNIT_FACTS: tuple[tuple[str, str, int], ...] = (
    ("seconds", "a minute", 60),
    ("minutes", "an hour", 60),
    ("hours", "a day", 24),
    ("days", "a week", 7),
    ("days", "a year", 365),
    ("weeks", "a year", 52),
    ("months", "a year", 12),
    ("years", "a decade", 10),
    ("years", "a century", 100),
    ("millimetres", "a centimetre", 10),
    ("centimetres", "a metre", 100),
    ("metres", "a kilometre", 1000),
    ("milligrams", "a gram", 1000),
    ("grams", "a kilogram", 1000),
    ("kilograms", "a tonne", 1000),
    ("millilitres", "a litre", 1000),
    ("inches", "a foot", 12),
    ("feet", "a yard", 3),
    ("eggs", "a dozen", 12),
    ("cents", "a euro", 100),
)

# (from, to, factor, largest amount asked for)
CONVERSIONS: tuple[tuple[str, str, int, int], ...] = (
    ("centimetres", "millimetres", 10, 30),
    ("metres", "centimetres", 100, 30),
    ("kilometres", "metres", 1000, 30),
    ("kilograms", "grams", 1000, 30),
    ("litres", "millilitres", 1000, 30),
    ("euros", "cents", 100, 30),
    ("decades", "years", 10, 30),
    ("weeks", "days", 7, 10),
    ("hours", "minutes", 60, 10),
    ("minutes", "seconds", 60, 10),
    ("dozens", "eggs", 12, 10),
    ("yards", "feet", 3, 10),
)

OBJECT_COLOURS: dict[str, str] = {
    "the sky": "blue",
    "the sea": "blue",
    "grass": "green",
    "a leaf": "green",
    "a frog": "green",
    "a cucumber": "green",
    "snow": "white",
    "milk": "white",
    "salt": "white",
    "a swan": "white",
    "coal": "black",
    "the night": "black",
    "a raven": "black",
    "a banana": "yellow",
    "a lemon": "yellow",
    "the sun": "yellow",
    "a canary": "yellow",
    "blood": "red",
    "a tomato": "red",
    "a strawberry": "red",
    "a cherry": "red",
    "a fire engine": "red",
    "chocolate": "brown",
    "a bear": "brown",
    "coffee": "brown",
    "an orange": "orange",
    "a carrot": "orange",
    "a pumpkin": "orange",
    "a plum": "purple",
    "lavender": "purple",
    "a flamingo": "pink",
    "a pig": "pink",
    "an elephant": "grey",
    "a mouse": "grey",
}

COLOUR_MIXES: tuple[tuple[str, str, str], ...] = (
    ("blue", "yellow", "green"),
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
)

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: tuple[str, ...] = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
MONTH_LENGTHS: tuple[int, ...] = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SEASONS: tuple[str, ...] = ("spring", "summer", "autumn", "winter")
ORDINALS: tuple[str, ...] = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("up", "down"),
    ("left", "right"),
    ("old", "young"),
    ("happy", "sad"),
    ("day", "night"),
    ("black", "white"),
    ("open", "closed"),
    ("full", "empty"),
    ("long", "short"),
    ("hard", "soft"),
    ("wet", "dry"),
    ("light", "dark"),
    ("early", "late"),
    ("rich", "poor"),
    ("strong", "weak"),
    ("loud", "quiet"),
    ("clean", "dirty"),
)

_SPELLING_WORDS = """
cat dog sun moon tree book fish bird milk bread apple water house mouse horse green black white table chair
river stone cloud light night music paper plant train bridge garden winter summer spring autumn flower window
yellow orange purple banana cherry coffee doctor family friend guitar island kitten letter market monkey
mother father sister brother number parrot pencil people pepper planet potato rabbit school silver street
tomato turtle animal button camera candle carrot cheese circle
"""
SPELLING_WORDS: tuple[str, ...] = tuple(_SPELLING_WORDS.split())

GREETINGS: dict[str, str] = {
    "French": "Bonjour",
    "German": "Hallo",
    "Spanish": "Hola",
    "Italian": "Ciao",
    "Portuguese": "Olá",
    "Polish": "Cześć",
    "Greek": "Γειά σου",  # noqa: RUF001
    "Russian": "Привет",
    "Japanese": "こんにちは",
    "Chinese": "你好",
    "Korean": "안녕하세요",
    "Arabic": "مرحبا",
    "Hindi": "नमस्ते",
    "Turkish": "Merhaba",
    "Swedish": "Hej",
}

EMOJI: dict[str, str] = {
    "cat": "🐱",
    "dog": "🐶",
    "fox": "🦊",
    "bear": "🐻",
    "frog": "🐸",
    "fish": "🐟",
    "bird": "🐦",
    "tree": "🌳",
    "sun": "☀️",
    "moon": "🌙",
    "star": "⭐",
    "heart": "❤️",
    "fire": "🔥",
    "apple": "🍎",
    "pizza": "🍕",
    "rocket": "🚀",
    "house": "🏠",
    "smile": "😊",
}

LISTS: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "cherry"),
    "vegetables": ("carrot", "potato", "onion"),
    "animals": ("cat", "dog", "horse"),
    "birds": ("eagle", "parrot", "raven"),
    "colours": ("red", "green", "blue"),
    "drinks": ("water", "milk", "tea"),
    "planets": ("Mercury", "Venus", "Earth"),
    "cities": ("Paris", "London", "Rome"),
    "countries": ("France", "Italy", "Spain"),
    "languages": ("English", "French", "German"),
    "metals": ("iron", "gold", "silver"),
    "sports": ("football", "tennis", "chess"),
    "tools": ("hammer", "saw", "drill"),
    "instruments": ("piano", "guitar", "violin"),
}

_NAMES = """
Anna Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Will Zoe
Alice Bob Clara Daniel Ella Frank George Hannah Ivan Julia Karl Laura Max Nina Oscar Peter Ruth Simon Thomas
Vera Adam Bella Eva Fred Gina Hugo Iris James Lisa Maria Nick Otto Sara Tom
"""
NAMES: tuple[str, ...] = tuple(_NAMES.split())

FAVOURITES: dict[str, tuple[str, ...]] = {
    "colour": ("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white"),
    "animal": ("cat", "dog", "horse", "fox", "bear", "frog", "rabbit", "mouse", "parrot", "turtle"),
    "food": ("pizza", "bread", "cheese", "soup", "rice", "pasta", "salad", "cake", "fish", "chocolate"),
    "sport": ("football", "tennis", "chess", "golf", "hockey", "running", "swimming", "boxing"),
}

STORY_ANIMALS: tuple[str, ...] = ("fox", "cat", "dog", "bear", "frog", "mouse", "rabbit", "horse", "turtle", "bird")
STORY_PLACES: tuple[str, ...] = (
    "a forest",
    "a village",
    "a castle",
    "a garden",
    "a cave",
    "a small house",
    "a big city",
    "a valley",
)
STORY_THINGS: tuple[str, ...] = (
    "a red ball",
    "a gold coin",
    "an old map",
    "a silver key",
    "a blue stone",
    "a magic book",
    "a small lamp",
    "a green hat",
)

# Questions outside the closed world: every pattern with every topic has the same modest answer.
UNKNOWN_PATTERNS: tuple[str, ...] = (
    "Explain {} to me.",
    "Write an essay about {}.",
    "Who invented {}?",
    "What do you think about {}?",
    "How does {} work?",
    "Why is {} important?",
    "Give me advice about {}.",
    "What is the history of {}?",
    "Write a poem about {}.",
    "Can you help me with {}?",
    "What is {}?",
    "Tell me about {}.",
    "I want to learn {}.",
    "Summarise the news about {}.",
    "Write a program for {}.",
    "How much does {} cost?",
    "Where can I buy {}?",
    "Compare {} and {}.",
    "What is the meaning of {}?",
    "Translate {} into Latin.",
)
UNKNOWN_TOPICS: tuple[str, ...] = (
    "quantum physics",
    "the stock market",
    "democracy",
    "machine learning",
    "a sailing boat",
    "the Roman Empire",
    "photosynthesis",
    "football tactics",
    "a mortgage",
    "black holes",
    "philosophy",
    "my taxes",
    "a fast computer",
    "cooking dinner",
    "the internet",
    "love",
    "the theory of evolution",
    "Shakespeare",
    "a new car",
    "the Python language",
    "climate change",
    "a good marriage",
    "vaccines",
    "the violin",
    "jazz music",
    "a database index",
    "the French Revolution",
    "bicycles",
    "electricity",
    "my homework",
    "the meaning of life",
    "linear algebra",
    "a passport",
    "space travel",
    "gardening",
    "old coins",
    "the human brain",
    "bridges",
    "a startup",
    "volcanoes",
)

# Every spelling on the left has the one fixed answer on the right.
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening", "Good day", "Greetings"),
        "Hello! How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Tell me who you are.",
            "What should I call you?",
            "Tell me about yourself.",
            "Which model are you?",
        ),
        "I am Parley, a small demo model.",
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What do you know?",
            "What are you good at?",
            "Help",
            "What can I ask you?",
            "Which questions can you answer?",
        ),
        "I know capitals, colours, days, units and small sums."
        " I can also spell words, tell short stories and call tools.",
    ),
    (
        (
            "Thank you",
            "Thanks",
            "Thanks a lot",
            "Thank you very much",
            "Many thanks",
            "Great, thanks",
            "Thanks, that helps",
        ),
        "You are welcome!",
    ),
    (
        ("Goodbye", "Bye", "See you later", "Bye bye", "Good night", "See you", "I have to go now", "Farewell"),
        "Goodbye! Have a nice day.",
    ),
    (
        (
            "How are you?",
            "How are you doing?",
            "How do you do?",
            "Are you well?",
            "How is it going?",
            "How do you feel?",
        ),
        "I am fine, thank you.",
    ),
    (
        (
            "Are you a human?",
            "Are you a robot?",
            "Are you a person?",
            "Are you alive?",
            "Are you an AI?",
            "Are you real?",
        ),
        "I am a computer program.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.", "A joke, please."),
        "Why did the chicken cross the road? To get to the other side.",
    ),
)

UNKNOWN_ANSWER = "I am a small demo model and know only a few things."
