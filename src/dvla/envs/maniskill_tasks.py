"""What to tell a policy: one natural-language instruction for each ManiSkill task.

ManiSkill itself gives instructions for a few tasks only. The tasks of the last group need assets that do not
come with it.
"""

from __future__ import annotations

_MANIPULATION = {
    "PushCube-v1": "push the blue cube onto the red and white target",
    "PullCube-v1": "pull the blue cube back onto the red and white target",
    "PickCube-v1": "pick up the red cube and hold it still at the goal position",
    "LiftPegUpright-v1": "lift the peg and stand it upright on the table",
    "StackCube-v1": "stack the red cube on the green cube and let go of it",
    "StackPyramid-v1": "put the red cube beside the green cube and stack the blue cube on top of both",
    "PlaceSphere-v1": "pick up the blue ball and put it into the bin",
    "PegInsertionSide-v1": "pick up the peg and insert its orange end into the hole in the box",
    "PlugCharger-v1": "pick up the charger and plug it into the receptacle",
    "PokeCube-v1": "grasp the peg and poke the cube with it until the cube is on the target",
    "PullCubeTool-v1": "take the L-shaped tool and use it to pull the cube within reach",
    "PushT-v1": "push the T-shaped block onto its outline on the table",
    "RollBall-v1": "give the ball a push so that it rolls to the target at the far end of the table",
    "FMBAssembly1Easy-v1": "assemble the parts on the red board with the help of the fixture",
    "PickCubeSO100-v1": "pick up the red cube and hold it still at the goal position",
    "SO100GraspCube-v1": "grasp the cube, lift it and bring the arm to its rest pose",
    "TwoRobotPickCube-v1": "pass the red cube to the right arm and lift it to the goal position",
    "TwoRobotStackCube-v1": "put the green cube on the target and, with the other arm, the blue cube on it",
}
_HANDS = {
    **{f"RotateValveLevel{level}-v1": "turn the valve with the three fingers" for level in range(5)},
    "RotateSingleObjectInHandLevel0-v1": "rotate the cube in the hand without dropping it",
    **{
        f"RotateSingleObjectInHandLevel{level}-v1": "rotate the object in the hand without dropping it"
        for level in range(1, 4)
    },
    **{f"TriFingerRotateCubeLevel{level}-v1": "move and turn the cube into the goal pose" for level in range(5)},
}
_BODIES = {
    "MS-AntWalk-v1": "walk forward",
    "MS-AntRun-v1": "run forward",
    "MS-CartpoleBalance-v1": "keep the pole on the cart balanced",
    "MS-CartpoleSwingUp-v1": "swing the pole up and keep it upright",
    "MS-HopperStand-v1": "stand up and stay upright",
    "MS-HopperHop-v1": "hop forward",
    "MS-HumanoidStand-v1": "stand upright",
    "MS-HumanoidWalk-v1": "walk forward",
    "MS-HumanoidRun-v1": "run forward",
    "UnitreeG1PlaceAppleInBowl-v1": "grasp the apple with the right hand and put it into the bowl",
    "UnitreeG1Stand-v1": "stand upright",
    "UnitreeG1TransportBox-v1": "grasp the box with both hands, carry it to the other table and put it down",
    "UnitreeH1Stand-v1": "stand upright",
    "UnitreeGo2-Reach-v1": "walk to the goal position",
    "AnymalC-Reach-v1": "walk to the goal position",
    "AnymalC-Spin-v1": "spin around on the spot",
}
_DRAWING = {
    "TableTopFreeDraw-v1": "draw on the canvas",
    "DrawTriangle-v1": "draw over the outline of the triangle",
    "DrawSVG-v1": "draw over the outline of the figure",
}
_NEEDING_ASSETS = {
    "PickCubeWidowXAI-v1": "pick up the red cube and hold it still at the goal position",
    "PickSingleYCB-v1": "pick up the object and move it to the goal position",
    "PickClutterYCB-v1": "pick the object out of the clutter and move it to the goal position",
    "AssemblingKits-v1": "pick up the loose part and insert it into the slot it fits",
    "TurnFaucet-v1": "turn the handle of the faucet open",
    "InsertFlower-v1": "insert the flower into the vase",
    "OpenCabinetDrawer-v1": "drive to the cabinet and pull the drawer open",
    "OpenCabinetDoor-v1": "drive to the cabinet and pull the door open",
    "PutCarrotOnPlateInScene-v1": "put the carrot on the plate",
    "PutEggplantInBasketScene-v1": "put the eggplant into the yellow basket",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the towel",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "stack the green block on the yellow block",
}

INSTRUCTIONS: dict[str, str] = _MANIPULATION | _HANDS | _BODIES | _DRAWING | _NEEDING_ASSETS
"""ManiSkill's task id to the instruction."""
